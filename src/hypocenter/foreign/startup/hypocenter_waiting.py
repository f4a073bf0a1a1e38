"""Waits in a program for torch and Triton, and then hands over to `foreign/hooks.py`; no more.

`sitecustomize.py` beside it loads it, in Python 3.7 and later. It stands alone and imports next to
nothing, for every Python below a doctor pays for it.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes as long as all else here
    from typing import Any

#: What a program may load later that is worth a look.
MODULES = (
    "torch",
    "torch._dynamo",
    "triton.runtime.jit",
    "triton.runtime.interpreter",
    "triton.runtime.autotuner",
    "triton.compiler.compiler",
    "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.codecache",
    "torch._inductor.graph",
    "torch._inductor.compile_fx",
    "numba.cuda.cudadrv.driver",
    "cupy",
    "jax_plugins.xla_cuda12",
    "jax_plugins.xla_cuda13",
    "jax._src.profiler",
    "triton.profiler",
)
_HERE = os.path.dirname(os.path.abspath(__file__))
#: Begins the name of a file that says why a process was not recorded.
NOTE = "unrecorded-"


class Waiting:
    """Finds modules as others would; tells `foreign.hooks.module_loaded` of those of MODULES."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in MODULES:
            return None
        for finder in list(sys.meta_path):
            spec = None
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    _tell_after(spec.loader)
                return spec
        return None


def _tell_after(loader: Any) -> None:
    run = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module  # the class's own from now on
        run(module)
        try:
            _hooks().module_loaded(module)
        except Exception as error:
            _note(error)

    try:
        loader.exec_module = exec_module
    except AttributeError as error:  # a loader that takes no attributes
        _note(error)


def _hooks() -> Any:
    """This process's own hypocenter, else the one that this file belongs to."""
    name = "hypocenter.foreign.hooks"
    try:
        return importlib.import_module(name)
    except ImportError:
        above = _HERE[: _HERE.rindex(f"{os.sep}hypocenter{os.sep}")]
        for known in [known for known in sys.modules if known.split(".")[0] == "hypocenter"]:
            del sys.modules[known]
        sys.path.append(above)
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(above)


def _note(error: BaseException) -> None:
    """Leave word for the doctor; the program goes on as it would have."""
    try:
        python = f"Python {sys.version.split()[0]}, {sys.executable}"
        text = f"{type(error).__name__}: {error} ({python})"
        path = os.path.join(os.environ["HYPO_RUN_DIR"], f"{NOTE}{os.getpid()}")
        with open(path, "w") as file:
            file.write(text[:2000])
    except (KeyError, OSError):
        return


def begin() -> None:
    """Wait from now on, before all other finders."""
    sys.meta_path.insert(0, Waiting())
