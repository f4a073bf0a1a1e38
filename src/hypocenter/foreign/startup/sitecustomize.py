"""Runs first in every Python below `hypo doctor -- COMMAND`; waits for torch and Triton, no more.

Its folder leads PYTHONPATH there. Any Python may load it, so its syntax is old and it stands alone;
what is recorded, and how, is in `foreign/recorder.py` and `foreign/hooks.py`.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

#: What a program may load later that is worth a look.
MODULES = ("torch", "triton.runtime.jit", "triton.runtime.interpreter")
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
    """Wait from now on, out of the way, and run the `sitecustomize` that this one hides."""
    sys.path[:] = [path for path in sys.path if not path or os.path.abspath(path) != _HERE]
    if os.environ.get("HYPO_RECORD", "1").lower() not in ("0", "false"):
        sys.meta_path.insert(0, Waiting())
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.loader is not None:
        module = importlib.util.module_from_spec(hidden)
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)


if __name__ == "sitecustomize":
    begin()
