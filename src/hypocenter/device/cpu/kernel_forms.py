"""Kernels by name, and their two forms as launches call them: with numba, or without.

The first process that needs a form has numba compile it, and links its machine code
(`object_code.py`). It keeps that, and what else a launch needs to know of the kernel, in the cache.
Later processes load the code and import neither numba nor the module of the kernel, which
would be half of a start. Whatever is missing, damaged or of another source comes from numba.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hypocenter.base import package
from hypocenter.device.cpu import kept_files, linked_code, target
from hypocenter.device.cpu.object_code import Linked, Unlinkable, link
from hypocenter.device.cpu.slots import key_of, slot_types_of
from hypocenter.device.cpu.sources import hash_of_files, import_closure
from hypocenter.record.catalogue import sources_of
from hypocenter.record.events import SourceRecord

if TYPE_CHECKING:
    from hypocenter.device.cpu.lang import CpuKernel

_log = logging.getLogger("hypocenter.cpu")
#: What makes linked code, calls it and puts it into memory: another text of these wants another.
_MAKERS = ("kernel_forms", "linked_code", "object_code", "slots", "spreaders")


class CodeEntry(NamedTuple):
    """Addresses of a kernel's machine code for some types of arguments, and of what calls it."""

    kernel: int
    spread: int
    enter: int


class _Facts(msgspec.Struct, frozen=True):
    """What a launch needs to know of a kernel; `files` below the package may be in its code, and
    `source` is the hash of their text."""

    name: str
    function: str
    parameters: tuple[str, ...]
    floats: frozenset[str]
    sources: tuple[SourceRecord, ...]
    files: tuple[str, ...]
    source: str


class NamedKernel:
    """A kernel for the CPU by its module and name; both are imported when numba has to be."""

    def __init__(self, module: str, name: str, made: CpuKernel | None = None) -> None:
        self._module, self._name, self._made = module, name, made
        self._entries: dict[tuple[bool, tuple[str, ...]], CodeEntry] = {}

    @property
    def name(self) -> str:
        return self._facts.name

    @property
    def function(self) -> str:
        """The name of its function."""
        return self._facts.function

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of what it takes, in order."""
        return self._facts.parameters

    @property
    def floats(self) -> frozenset[str]:
        """Names of the parameters that are annotated `float`: numbers of 32 bits."""
        return self._facts.floats

    @property
    def sources(self) -> tuple[SourceRecord, ...]:
        """Its text, as a record of a launch has it."""
        return self._facts.sources

    @cached_property
    def made(self) -> CpuKernel:
        """What numba compiles; imports it."""
        if self._made is not None:
            return self._made
        found: CpuKernel = getattr(importlib.import_module(self._module), self._name)
        return found

    def form(self, *, is_shared: bool, reads: Sequence[tuple[Any, int]] = ()) -> KernelForm:
        return KernelForm(self, is_shared, tuple(reads))

    def known_entry(self, is_shared: bool, args: Sequence[Any]) -> CodeEntry | None:
        """Where the code for such arguments lies, if it is loaded, or was linked and is kept."""
        key = is_shared, key_of(args)
        if (entry := self._entries.get(key)) is None and (entry := self._load(*key)) is not None:
            self._entries[key] = entry
        return entry

    def note(self, is_shared: bool, args: Sequence[Any], entry: CodeEntry) -> None:
        self._entries[is_shared, key_of(args)] = entry

    def link(
        self, is_shared: bool, args: Sequence[Any], code: bytes, function: str
    ) -> CodeEntry | None:
        """Link and load an object file that has the code for such arguments under `function`, and
        keep it for later processes; None where that cannot be."""
        if not linked_code.can_load():
            return None
        from hypocenter.device.cpu import spreaders

        others = spreaders.object_code([slot_types_of(args)])
        named = function, spreaders.name_of(0), spreaders.ENTER
        try:
            linked = link([code, others], named, linked_code.OUTER)
        except Unlinkable as why:
            _log.info("%s is not linked: %s", self.name, why)
            return None
        entries = dict(zip(CodeEntry._fields, map(linked.entries.__getitem__, named), strict=True))
        linked = msgspec.structs.replace(linked, entries=entries)
        if (addresses := linked_code.load(linked)) is None:
            return None
        if self._can_be_kept:
            kept_files.write(self._facts_file, msgspec.msgpack.encode(self._facts))
            file = self._code_file(is_shared, key_of(args))
            kept_files.write(file, msgspec.msgpack.encode(linked))
        return CodeEntry(**addresses)

    @cached_property
    def _facts(self) -> _Facts:
        if self._can_be_kept and (kept := kept_files.read(self._facts_file)) is not None:
            facts = msgspec.msgpack.decode(kept, type=_Facts)
            if _hash_of(facts.files) == facts.source:
                return facts
        made = self.made
        function = made.serial.py_func
        file = Path(function.__code__.co_filename)
        files: tuple[str, ...] = ()
        if package.is_own_file(str(file)):
            found = import_closure(file)
            files = tuple(sorted(str(path.relative_to(package.FOLDER)) for path in found))
        return _Facts(
            name=made.name,
            function=function.__name__,
            parameters=made.parameters,
            floats=made.floats,
            sources=sources_of(made.serial),
            files=files,
            source=_hash_of(files),
        )

    @cached_property
    def _can_be_kept(self) -> bool:
        return bool(self._module and target.digest()) and linked_code.can_load()

    @cached_property
    def _facts_file(self) -> str:
        return _file_name("facts", self._module, self._name)

    def _code_file(self, is_shared: bool, key: tuple[str, ...]) -> str:
        of_kernel = self._facts.source, self._module, self._name, str(is_shared)
        return _file_name("code", target.instruction_set(), *of_kernel, *key)

    def _load(self, is_shared: bool, key: tuple[str, ...]) -> CodeEntry | None:
        if not self._can_be_kept:
            return None
        kept = kept_files.read(self._code_file(is_shared, key))
        if kept is None:
            return None
        addresses = linked_code.load(msgspec.msgpack.decode(kept, type=Linked))
        return None if addresses is None else CodeEntry(**addresses)


class KernelForm:
    """One of the two forms of a kernel: for one thread, or for several that share its items.

    `reads`: the arrays that its items go through, one after the other, and the items of each.
    """

    __slots__ = ("is_shared", "kernel", "reads")

    def __init__(self, kernel: NamedKernel, is_shared: bool, reads: tuple[Any, ...] = ()) -> None:
        self.kernel, self.is_shared, self.reads = kernel, is_shared, reads

    @property
    def __name__(self) -> str:
        return self.kernel.function

    @property
    def arg_names(self) -> tuple[str, ...]:
        return self.kernel.parameters

    @property
    def sources(self) -> tuple[SourceRecord, ...]:
        return self.kernel.sources

    @property
    def dispatcher(self) -> Any:
        """numba's, which is imported for it."""
        return self.kernel.made.shared if self.is_shared else self.kernel.made.serial

    @property
    def py_func(self) -> Callable[..., Any]:
        function: Callable[..., Any] = self.kernel.made.serial.py_func
        return function

    def is_ready(self, args: Sequence[Any]) -> bool:
        """Whether its code for such arguments is here, without numba."""
        return self.kernel.known_entry(self.is_shared, args) is not None

    def entry(self, args: Sequence[Any]) -> CodeEntry:
        """Where its code for such arguments lies; numba compiles it if need be."""
        known = self.kernel.known_entry(self.is_shared, args)
        return known if known is not None else self.compile_entry(args)

    def compile_entry(self, args: Sequence[Any]) -> CodeEntry:
        """As `entry`, of what numba has compiled, or compiles now."""
        from hypocenter.device.cpu import spreaders
        from hypocenter.device.cpu.lang import address_of, machine_code

        name, code = machine_code(self.dispatcher, args)
        entry = self.kernel.link(self.is_shared, args, code, name)
        if entry is None:
            (spread,), enter = spreaders.addresses([slot_types_of(args)])
            entry = CodeEntry(address_of(self.dispatcher, args), spread, enter)
        self.kernel.note(self.is_shared, args, entry)
        return entry


@cache
def named_kernel(place: str) -> NamedKernel:
    """The kernel at a place below the package: "kernels.rowwise.norm_cpu.rms_norm"."""
    module, _, name = place.rpartition(".")
    return NamedKernel(f"{package.NAME}.{module}", name)


@cache
def kernel_at_hand(kernel: CpuKernel) -> NamedKernel:
    """A kernel that is at hand; its machine code is kept by numba alone."""
    return NamedKernel("", kernel.name, kernel)


def _hash_of(files: Sequence[str]) -> str:
    """Empty where one of them is not there any more."""
    try:
        return hash_of_files(package.FOLDER / file for file in files)
    except OSError:
        return ""


@cache
def _hash_of_makers() -> str:
    return _hash_of([f"device/cpu/{name}.py" for name in _MAKERS])


def _file_name(*parts: str) -> str:
    text = "\0".join((_hash_of_makers(), target.digest(), *parts))
    return f"{parts[0]}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
