"""The machine code of `observer.cpp`, compiled for the torch and the Python of this process."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from hypocenter.base.package import OBSERVER
from hypocenter.settings.cache_folder import private_folder

#: Folder of the cache, and the name of the module, which its code has as well.
FOLDER, NAME = "native", "hypo_ops"
COMPILE_SECONDS = 240
COMPILERS = ("g++", "c++", "clang++")
_OPTIONS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
_MAX_CHARS = 300
#: Compiles behind the run, slower than all else that wants a processor, and for so many seconds of
#: it at most. What failed is left alone.
LATER_CPU_SECONDS = 300
_LATER = """( ulimit -t "$SECONDS_OF_CPU"
nice -n 19 "$@" && mv -f "$PART" "$MADE" || { rm -f "$PART"; : > "$FAILED"; } ) &"""
#: One that was begun so long ago was ended before it was done.
_LATER_SECONDS = 3600


#: Of the environment what a compiler may need: nothing that would record it.
_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "CPATH", "LIBRARY_PATH")


class NotBuilt(Exception):
    """There is no machine code; says why in one sentence."""


def is_built(torch: Any) -> bool:
    """Whether the module has been compiled, for this torch and by the compiler that is there."""
    try:
        return _library_place(torch)[0].is_file()
    except NotBuilt:
        return False


def has_failed(torch: Any) -> bool:
    """Whether the module could not be compiled behind an earlier run; raises NotBuilt."""
    return _failure_mark(_library_place(torch)[0]).exists()


def build_later(torch: Any) -> bool:
    """Begin to compile the module for the next run, which this one does not wait for.

    False where that is under way or has failed before. Raises NotBuilt where it cannot be done.
    """
    made, command = _library_place(torch)
    part, failed = made.with_suffix(".part"), _failure_mark(made)
    with contextlib.suppress(OSError):
        if time.time() - part.stat().st_mtime > _LATER_SECONDS:
            part.unlink()
    if failed.exists():
        return False
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    words = {
        "PART": str(part),
        "MADE": str(made),
        "FAILED": str(failed),
        "SECONDS_OF_CPU": str(LATER_CPU_SECONDS),
    }
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    whole = [*command, "-o", str(part), *_libraries_of(torch)]
    subprocess.run(
        ["/bin/sh", "-c", _LATER, "sh", *whole],
        env={**kept, **words},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )
    return True


def load(torch: Any) -> Any:
    """The module, compiled if that was not done yet; raises NotBuilt."""
    path = _library_file(torch)
    spec = importlib.machinery.ModuleSpec(
        NAME, importlib.machinery.ExtensionFileLoader(NAME, str(path)), origin=str(path)
    )
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except Exception as error:  # torch says in many ways that a key is taken
        raise NotBuilt(f"{path.name} cannot be loaded: {error}"[:_MAX_CHARS]) from error
    return module


def _failure_mark(made: Path) -> Path:
    return made.with_suffix(".failed")


def _library_file(torch: Any) -> Path:
    made, command = _library_place(torch)
    if not made.is_file():
        with tempfile.TemporaryDirectory(dir=made.parent) as work:
            out = Path(work) / "out.so"
            _compile([*command, "-o", str(out), *_libraries_of(torch)])
            out.rename(made)
    return made


def _library_place(torch: Any) -> tuple[Path, list[str]]:
    """The file of the module, and the command that makes it but for its last words."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NotBuilt(f"it takes a C++ compiler, and none of {', '.join(COMPILERS)} is on PATH")
    folder, problem = private_folder(FOLDER)
    if folder is None:
        raise NotBuilt(problem)
    command = [compiler, *_OPTIONS, *_paths_of(torch), f"-DHYPO_NAME={NAME}", str(OBSERVER)]
    return folder / f"{NAME}-{_digest(torch, compiler, command)}.so", command


def _compile(command: list[str]) -> None:
    name = Path(command[0]).name
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{name} did not compile {OBSERVER.name}: {error}"[:_MAX_CHARS]) from error
    if ran.returncode:
        said = next((line for line in ran.stderr.splitlines() if "error" in line), ran.stderr)
        raise NotBuilt(f"{name} did not compile {OBSERVER.name}: {said}"[:_MAX_CHARS])


def _paths_of(torch: Any) -> list[str]:
    include = Path(torch.__file__).parent / "include"
    python = sysconfig.get_paths()["include"]
    if not (Path(python) / "Python.h").is_file():
        raise NotBuilt(f"Python.h is not in {python}: the headers of Python are not installed")
    api = include / "torch" / "csrc" / "api" / "include"
    paths = [f"-I{folder}" for folder in (include, api, python)]
    return [*paths, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]


def _libraries_of(torch: Any) -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    return [f"-L{libraries}", "-ltorch_python", "-ltorch_cpu", "-lc10"]


def _digest(torch: Any, compiler: str, command: list[str]) -> str:
    """Of all that the code depends on."""
    found = os.stat(compiler)
    parts = [sys.version, os.uname().machine, torch.__version__, str(torch.version.git_version)]
    parts += [*command, f"{found.st_size} {found.st_mtime_ns}"]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(OBSERVER.parent.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
