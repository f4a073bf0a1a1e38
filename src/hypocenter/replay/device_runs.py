"""A recorded launch made again on a GPU of this machine, in forms to ask the compiler for.

Runs the bundle's text of the kernel, in a process of its own: whoever calls has allowed that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import msgspec

from hypocenter.base.own_folder import own_folder
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place
from hypocenter.replay.export import runs_text
from hypocenter.replay.forms import Ran, RunForm

#: What a process may take that compiles a kernel some times.
MAX_SECONDS = 90.0
#: What it may take to go, once it was killed.
_KILLED_SECONDS = 5.0
#: Where the drivers of GPUs are to be asked.
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_MAX_CHARS = 300


def can_run(index: BundleIndex, place: Place) -> bool:
    """Whether this machine has what the launch ran on: a GPU, or Triton's interpreter."""
    is_interpreted = index.launch(place).device == "interpreter"
    return is_interpreted or any(map(os.path.exists, _DRIVERS))


def run_forms(
    index: BundleIndex,
    place: Place,
    forms: Sequence[RunForm],
    environment: dict[str, str],
    seconds: float = MAX_SECONDS,
) -> list[Ran]:
    """What came of each form, with these variables of the environment beside our own.

    All of them have `seconds`. The kernel is compiled anew: Triton's cache is an empty folder.
    Raises as `repro_text` does.
    """
    text = runs_text(index, place)
    is_interpreted = index.launch(place).device == "interpreter"
    with own_folder("hypo-launch-") as folder:
        file, asked, out = (folder / name for name in ("launch.py", "forms", "ran"))
        file.write_text(text)
        asked.write_bytes(msgspec.msgpack.encode(list(forms)))
        package = str(resources.files("hypocenter").joinpath(".."))
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": path, "TRITON_CACHE_DIR": f"{folder}/cache", "HYPO_RECORD": "0"}
        own["TRITON_INTERPRET"] = "1" if is_interpreted else "0"
        command = [sys.executable, str(file), str(asked), str(out)]
        problem = run_for(command, {**os.environ, **own, **environment}, folder, seconds)
        found = msgspec.msgpack.decode(out.read_bytes(), type=list[Ran]) if out.exists() else []
    problem = problem or "its process ended"
    return found + [Ran(problem=problem)] * (len(forms) - len(found))


def run_for(command: list[str], environment: dict[str, str], folder: Path, seconds: float) -> str:
    """Run it, and end it with all that it started when its time is over; what it said.

    A compiler that a process has started would go on without it, with the pipe in its hands.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"it was not done after {seconds:.0f} seconds"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that a driver holds stays
            process.wait(_KILLED_SECONDS)
        if process.stderr is not None:
            process.stderr.close()
    return " ".join(said[-_MAX_CHARS:].split())
