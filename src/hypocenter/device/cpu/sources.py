"""Which files may end up in the machine code of a kernel, and one hash of their text.

numba's own key sees only the file of the outer function and misses an edited callee. Ours is a hash
of that file and of every file that it imports, so an edit anywhere else recompiles nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import msgspec

from hypocenter.base import package
from hypocenter.device.cpu import kept_files

#: Modules that kernels' files import and that hold nothing which could end up in machine code.
NOT_IN_KERNELS = frozenset(
    {"hypocenter.settings.config", "hypocenter.base.errors", "hypocenter.base.package"}
)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(hypocenter[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)"
    r"|import[ \t]+(hypocenter[\w.]*))",
    re.MULTILINE,
)
#: How an op names a kernel that is imported when it is needed: by room, file and function.
_KERNEL = re.compile(r'"(?:kernels\.)?(\w+)\.(\w+_cpu)\.')


class _Closure(msgspec.Struct, frozen=True):
    """The paths of files, and the hash of their text."""

    files: list[str]
    source: str


@cache
def import_closure(file: Path) -> frozenset[Path]:
    """A file of the package and all that it imports, directly or not: what may be in its kernels.

    Imports inside functions count as well, and kernels that an op names.
    """
    found, waiting = {file}, [file]
    while waiting:
        missing = imported_files(waiting.pop()) - found
        found |= missing
        waiting += missing
    return frozenset(found)


@cache
def source_hash(file: Path) -> str:
    """Hash of the text of a file and of its import closure.

    Which files those are is kept: it is the same as long as their text is.
    """
    name = f"sources-{hashlib.sha256(str(file).encode()).hexdigest()[:32]}"
    if (kept := kept_files.read(name)) is not None:
        closure = msgspec.msgpack.decode(kept, type=_Closure)
        with contextlib.suppress(OSError):
            if hash_of_files(map(Path, closure.files)) == closure.source:
                return closure.source
    files = import_closure(file)
    closure = _Closure(sorted(map(str, files)), hash_of_files(files))
    kept_files.write(name, msgspec.msgpack.encode(closure))
    return closure.source


def hash_of_files(files: Iterable[Path]) -> str:
    """Hash of the texts of files and of their names; raises OSError for one that is not there."""
    digest = hashlib.sha256()
    for path in sorted(files):
        is_own = package.is_own_file(str(path))
        name = path.relative_to(package.FOLDER).as_posix() if is_own else path.name
        digest.update(name.encode() + b"\0" + _text_of(path) + b"\0")
    return digest.hexdigest()[:16]


@cache
def imported_files(file: Path) -> frozenset[Path]:
    """The files of the package that a file imports itself."""
    return frozenset(_module_files(_text_of(file).decode()))


@cache
def _text_of(file: Path) -> bytes:
    return file.read_bytes()


def _module_files(text: str) -> Iterator[Path]:
    for match in _KERNEL.finditer(text):
        file = package.FOLDER / "kernels" / match[1] / f"{match[2]}.py"
        if file.is_file():
            yield file
    for match in _IMPORT.finditer(text):
        module = match[1] or match[3]
        names = re.findall(r"\w+", match[2] or "")
        for dotted in (module, *(f"{module}.{name}" for name in names)):
            file = package.FOLDER.joinpath(*dotted.split(".")[1:]).with_suffix(".py")
            if dotted not in NOT_IN_KERNELS and file.is_file():
                yield file
