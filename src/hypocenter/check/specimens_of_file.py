"""Runs a file as on a GPU that is not there and keeps what kinds of launches it makes.

Executes the file with the rights of the caller; the launches really run, on the CPU, since what a
file launches next may hang on what the last launch gave. For a process that does nothing else.
"""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypocenter.base.errors import HypoError
from hypocenter.check.launches import Launches
from hypocenter.check.pretend_gpu import OnCpu, pretend
from hypocenter.device.limits import named_gpu
from hypocenter.device.offline.compile import specimen_of_launch
from hypocenter.device.offline.specimen import Specimen

BUDGET_SECONDS = 60.0
_MAX_LABEL_CHARS = 100


class SpecimenRecorder(Launches):
    """Replays launches like `hypo check`, reports nothing, and keeps one specimen of each kind."""

    def __init__(self) -> None:
        super().__init__(BUDGET_SECONDS, lambda _: None)
        self.specimens: dict[Any, Specimen] = {}

    def launch(self, jit: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        known = {name: value for name, value in kwargs.items() if name in jit.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in jit.arg_names}
        bound = inspect.signature(jit.fn).bind(*args, **known).arguments
        specimen = specimen_of_launch(jit, bound, options)
        key = (id(jit), str(specimen.signature), str(specimen.constants), specimen.divisible)
        self.specimens.setdefault((*key, str(options)), replace(specimen, label=_label(specimen)))
        super().launch(jit, args, grid, kwargs)


def _label(specimen: Specimen) -> str:
    types = " ".join(kind for kind in specimen.signature.values() if kind.startswith("*"))
    numbers = {**specimen.constants, **specimen.options}
    if numbers.get("num_ctas") == 1:  # every configuration of an autotuner says so
        del numbers["num_ctas"]
    label = " ".join([types, *(f"{name}={value}" for name, value in numbers.items())]).strip()
    return label if len(label) <= _MAX_LABEL_CHARS else f"{label[: _MAX_LABEL_CHARS - 3]}..."


def record(path: str, arch: str) -> tuple[list[Specimen], str]:
    """Specimens of the launches of `path`, and why it ended early, if it did.

    Raises HypoError when it ended early without a launch.
    """
    recorder = SpecimenRecorder()
    pretend(named_gpu(arch), recorder.watch)
    recorder.install()
    sys.argv = [path]
    sys.path.insert(0, str(Path(path).resolve().parent))
    problem = ""
    try:
        with OnCpu(recorder.watch.note_copy), recorder.watch:
            runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        problem = f"it left by sys.exit({left.code!r})" if left.code else ""
    except HypoError as error:
        problem = str(error)
    except BaseException as error:  # the file's own; whatever it is, it ended the file
        traceback.print_exception(error)
        problem = f"{type(error).__name__}: {error}"
    if problem and not recorder.specimens:
        raise HypoError(f"{path} ended before its first launch: {problem}")
    return list(recorder.specimens.values()), problem
