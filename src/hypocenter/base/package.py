"""Where this package's own files lie; nothing else derives a fact from a path of its own.

A file may so move to another folder, and nothing that looks for it goes blind.
"""

from __future__ import annotations

import functools
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

NAME = "hypocenter"
#: What a process runs that holds a part of a model and is not the first.
RANK_MODULE = f"{NAME}.engine.ranks.program"
#: What a person calls the command line, and what Python calls it.
_COMMANDS = ("hypo", NAME)
FOLDER = Path(__file__).parents[1]
#: What is no code.
ASSETS = FOLDER / "assets"
#: What is compiled where a program's driver is watched.
CALLBACK = FOLDER / "foreign" / "driver" / "callback.c"
#: What is compiled where a program's operations of torch are seen.
OBSERVER = FOLDER / "foreign" / "ops" / "observer.cpp"
#: What the GPU kernels were run and compiled with: on GPUs, and on the CPU.
_TESTED_TRITONS = ("3.6", "3.9")
#: Rooms in which kernels lie that a bundle may name.
_KERNEL_ROOMS = ("kernels",)


def bundled_model() -> Path:
    """The model that comes with the package."""
    return ASSETS / "demo-q8_0.gguf"


def version() -> str:
    """The version that is installed; of a tree of sources that is not, what its project says."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        with open(FOLDER.parents[1] / "pyproject.toml", "rb") as file:
            return str(tomllib.load(file)["project"]["version"])


def triton_problem(version: str) -> str:
    """What to say of a Triton that no kernel here was tested with; nothing of others."""
    if ".".join(version.split(".")[:2]) in _TESTED_TRITONS:
        return ""
    return f"triton is {version}, but kernels were tested with {' and '.join(_TESTED_TRITONS)} only"


def module_command(module: str) -> list[str]:
    """The command line that runs a module of this package in a process of its own.

    Python's `-P` keeps the current folder from where modules are sought: a folder that was
    downloaded may hold a file that is named as a module is, and that is not ours to run.
    """
    return [sys.executable, "-P", "-m", module]


def place_of_own_name(command: Sequence[str]) -> int | None:
    """Which word of a command is `hypo`, or the module that it is; None where none is."""
    return next((n for n, word in enumerate(command[:5]) if Path(word).name in _COMMANDS), None)


def is_own_file(filename: str) -> bool:
    """Whether the code of a frame, `co_filename`, is this package's."""
    return filename.startswith(f"{FOLDER}{os.sep}")


# A launch asks it of each frame above; there are few files.
@functools.lru_cache(maxsize=4096)
def is_below(filename: str, *places: str) -> bool:
    """Whether a file lies in one of these folders of the package, or is one of these files.

    Places are paths below the package: "device", "kernels/linear", "device/memory.py".
    """
    paths = (str(FOLDER.joinpath(place)) for place in places)
    return filename.startswith(
        tuple(path if path.endswith(".py") else path + os.sep for path in paths)
    )


def caller_outside(*places: str) -> str:
    """`file:line` of the nearest caller that is not below these places of the package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_below(frame.f_code.co_filename, *places):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def module_files(room: str) -> Iterator[Path]:
    """The files of a folder of the package and of all below it, by their stems."""
    yield from sorted(FOLDER.joinpath(room).rglob("*.py"), key=lambda path: (path.stem, path))


def gpu_kernel_files() -> list[Path]:
    """The files in which this package's Triton kernels stand."""
    return [path for path in module_files("kernels") if path.stem.endswith("_gpu")]


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    return ".".join((NAME, *path.relative_to(FOLDER).with_suffix("").parts))


def kernel_module(stem: str) -> str:
    """The dotted name of the file of kernels with this stem: "rope_gpu".

    Raises KeyError when there is none.
    """
    for path in module_files("kernels"):
        if path.stem == stem:
            return module_name(path)
    raise KeyError(f"there is no file {stem}.py below {FOLDER / 'kernels'}")


def recorded_kernel_module(file: str) -> str | None:
    """The dotted name of a kernel's file that was recorded elsewhere; None if we have no such.

    What counts is the path below the package, wherever that was installed.
    """
    parts = Path(file).with_suffix("").parts
    if NAME not in parts or not file.endswith(".py"):
        return None
    below = parts[len(parts) - parts[::-1].index(NAME) :]
    if not below or below[0] not in _KERNEL_ROOMS or not all(map(str.isidentifier, below)):
        return None
    here = FOLDER.joinpath(*below).with_suffix(".py")
    return module_name(here) if here.is_file() else None
