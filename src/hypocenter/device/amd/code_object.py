"""AMD code objects: the ELF files that a HIP compiler and Triton make, read for being run.

Source: LLVM's user guide of the AMDGPU backend, "Code Object". Code objects of version 5 and 6 are
read, as files or out of a bundle. Executes nothing. Every count has a bound, and what makes no
sense is refused by one line.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from hypocenter.base.errors import BadCodeObject, BadCoreDump
from hypocenter.coredump.elf import EXECUTE, LOAD, NOTE, Elf, Function
from hypocenter.coredump.lines import line_rows
from hypocenter.device.amd.bundle import COMPRESSED_MAGIC, MAGIC, code_of_bundle
from hypocenter.device.amd.descriptor import DESCRIPTOR_BYTES, KernelDescriptor, read_descriptor
from hypocenter.device.amd.evidence.parameter_types import NumberType, parameter_types
from hypocenter.device.amd.targets import AmdTarget, target_of_flags
from hypocenter.record.gpu_stop import GpuFrame

#: A file of code is read as a whole; so is what it becomes when it is loaded.
MAX_OBJECT_BYTES = 256 << 20
MAX_KERNELS, MAX_ARGUMENTS, MAX_KERNARG_BYTES = 1 << 14, 1024, 1 << 16
_EM_AMDGPU, _OS_ABI_HSA = 224, 64
#: `EI_ABIVERSION` of code object V4 to V6.
_VERSIONS = {2: 4, 3: 5, 4: 6}
_READ_VERSIONS = (5, 6)
_METADATA = 32  # NT_AMDGPU_METADATA
_ABSOLUTE, _RELATIVE = 3, 13  # R_AMDGPU_ABS64, R_AMDGPU_RELATIVE64


class _ArgumentFacts(msgspec.Struct, rename=lambda name: f".{name}"):
    offset: int
    size: int
    value_kind: str
    name: str = ""


class _KernelFacts(msgspec.Struct, rename=lambda name: f".{name}"):
    """One entry of `amdhsa.kernels`."""

    name: str
    symbol: str
    kernarg_segment_size: int
    max_flat_workgroup_size: int
    vgpr_count: int
    sgpr_count: int
    wavefront_size: int
    args: list[_ArgumentFacts] = []
    agpr_count: int = 0
    vgpr_spill_count: int = 0
    sgpr_spill_count: int = 0


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """One part of the kernarg: `kind` is the metadata's `.value_kind`, `name` "" where none is,
    `type` what debug information says of a number.

    Arguments that the launcher fills by itself, such as the number of blocks, are `hidden_...`.
    """

    name: str
    kind: str
    offset: int
    num_bytes: int
    type: NumberType = NumberType.OTHER

    @property
    def is_hidden(self) -> bool:
        return self.kind.startswith("hidden_")

    @property
    def is_pointer(self) -> bool:
        return self.kind == "global_buffer"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: `entry` is the address of its first instruction, before the base is added.

    `code_bytes` reach to the end of its function. `scalar_spills` and `vector_spills` are
    registers, `max_threads` is what the compiler promised itself for a block.
    """

    name: str
    descriptor: KernelDescriptor
    descriptor_address: int
    entry: int
    code_bytes: int
    arguments: tuple[KernelArgument, ...]
    max_threads: int
    vector_registers: int
    scalar_registers: int
    accumulators: int
    vector_spills: int
    scalar_spills: int

    @property
    def shown(self) -> tuple[KernelArgument, ...]:
        """The arguments that the program passes."""
        return tuple(argument for argument in self.arguments if not argument.is_hidden)


def _source_names(symbol: str) -> tuple[str, ...]:
    """The name that C++ source has for a symbol, alone and with its namespaces.

    Of a name with templates it is that of the template. Source: Itanium's ABI of C++, 5.1 Mangling.
    """
    found = re.match(r"_ZN?[rVKL]*(?=\d)", symbol)
    if found is None:
        return ()
    parts, at = [], found.end()
    while (length := re.compile(r"L?(\d{1,4})").match(symbol, at)) is not None:
        at = length.end() + int(length[1])
        parts.append(symbol[length.end() : at])
        if not found[0].startswith("_ZN"):
            break
    return parts[-1], "::".join(parts)


class CodeObject:
    """A code object: target, kernels, the memory it is loaded to, and its lines of source.

    Addresses are those of the file; `memory_image` puts them behind a base. Raises BadCodeObject.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        try:
            self._elf = Elf(data, 0, len(data), name)
            self.target, self.version = self._target(data)
            self.metadata = self._metadata()
            self.kernels = {kernel.name: kernel for kernel in self._kernels()}
        except BadCoreDump as error:
            raise BadCodeObject(error.name, error.reason) from error

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of that name, or the only one; else BadCodeObject names those that are.

        A name as C++ source has it will do where one kernel has it: `add` is `_Z3addPfi`.
        """
        if name is not None and name in self.kernels:
            return self.kernels[name]
        if name is None:
            found = list(self.kernels.values())
        else:
            found = [held for held in self.kernels.values() if name in _source_names(held.name)]
        if len(found) == 1:
            return found[0]
        held = ", ".join(list(self.kernels)[:8]) or "none"
        wanted = "says no kernel to launch" if name is None else f"has no kernel {name}"
        raise BadCodeObject(self.name, f"{wanted}; it holds {held}")

    def memory_image(self, base: int) -> bytearray:
        """What lies from `base` on once the object is loaded, with every address filled in."""
        segments = self._elf.segments(LOAD)
        past = max((part.address + part.memory_bytes for part in segments), default=0)
        if past > MAX_OBJECT_BYTES:
            raise BadCodeObject(self.name, f"needs {past} bytes, limit {MAX_OBJECT_BYTES}")
        memory = bytearray(past)
        try:
            for part in segments:
                memory[part.address : part.address + part.num_bytes] = self._elf.read(
                    part.start, min(part.num_bytes, part.memory_bytes)
                )
            for at, kind, value in self._elf.relocations():
                self._fill(memory, at, kind, base + value)
        except BadCoreDump as error:
            raise BadCodeObject(error.name, error.reason) from error
        return memory

    def text(self) -> tuple[range, ...]:
        """The addresses that hold machine code."""
        parts = self._elf.segments(LOAD)
        return tuple(
            range(part.address, part.address + part.num_bytes)
            for part in parts
            if part.flags & EXECUTE
        )

    def symbol_address(self, name: str) -> int | None:
        """Where a variable or function of that name lies."""
        found = self._elf.symbol(name)
        return None if found is None else found.value

    def function_at(self, pc: int) -> Function | None:
        return self._elf.function_at(pc)

    def frame_at(self, pc: int) -> GpuFrame | None:
        """File and line of the instruction at `pc`; None where the object does not say."""
        addresses, frames = self._lines
        at = bisect.bisect_right(addresses, pc) - 1
        return frames[at] if at >= 0 else None

    @cached_property
    def _lines(self) -> tuple[list[int], list[GpuFrame | None]]:
        """First addresses in order, and what stands from each on."""
        try:
            rows = line_rows(self._elf)
        except BadCoreDump as error:
            raise BadCodeObject(error.name, error.reason) from error
        return [address for address, _ in rows], [frame for _, frame in rows]

    # -- the parts ------------------------------------------------------------------------------

    def _target(self, data: bytes) -> tuple[AmdTarget, int]:
        if self._elf.machine != _EM_AMDGPU or data[7] != _OS_ABI_HSA:
            raise BadCodeObject(self.name, "is an ELF file, but no code for an AMD GPU")
        flags = int.from_bytes(data[48:52], "little")
        target = target_of_flags(flags)
        if target is None:
            raise BadCodeObject(self.name, f"is for a target not known here (e_flags 0x{flags:x})")
        version = _VERSIONS.get(data[8])
        if version not in _READ_VERSIONS:
            held = f"V{version}" if version else f"of ABI {data[8]}"
            raise BadCodeObject(
                self.name, f"is a code object {held}; V5 and V6 are read: compile it anew"
            )
        return target, version

    def _metadata(self) -> Mapping[str, Any]:
        for segment in self._elf.segments(NOTE):
            for owner, kind, note in self._elf.notes(segment):
                if owner != "AMDGPU" or kind != _METADATA:
                    continue
                try:
                    decoded = msgspec.msgpack.decode(note)
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    raise BadCodeObject(
                        self.name, f"has metadata that is no msgpack: {error}"
                    ) from error
                if isinstance(decoded, dict):
                    return decoded
        raise BadCodeObject(self.name, "has no metadata note, so its kernels are not known")

    def _kernels(self) -> Iterator[Kernel]:
        held = self.metadata.get("amdhsa.kernels") or []
        if not isinstance(held, list) or len(held) > MAX_KERNELS:
            raise BadCodeObject(
                self.name, f"has metadata of no list of at most {MAX_KERNELS} kernels"
            )
        for facts in held:
            try:
                kernel = msgspec.convert(facts, _KernelFacts)
            except msgspec.ValidationError as error:
                why = f"has metadata of a kernel that makes no sense: {error}"
                raise BadCodeObject(self.name, why) from error
            yield self._kernel(kernel)

    def _kernel(self, facts: _KernelFacts) -> Kernel:
        symbol = self._elf.symbol(facts.symbol)
        data = b"" if symbol is None else self._elf.code(symbol.value, DESCRIPTOR_BYTES)
        if symbol is None or len(data) != DESCRIPTOR_BYTES:
            raise BadCodeObject(
                self.name, f"has no descriptor {facts.symbol} of {DESCRIPTOR_BYTES} bytes"
            )
        descriptor = read_descriptor(data, self.target)
        entry = symbol.value + descriptor.entry
        if not any(entry in part for part in self.text()):
            raise BadCodeObject(
                self.name, f"enters {facts.name} at 0x{entry:x}, where no code lies"
            )
        if descriptor.wavefront != facts.wavefront_size:
            waves = f"{descriptor.wavefront} and {facts.wavefront_size}"
            raise BadCodeObject(self.name, f"says waves of {waves} lanes for {facts.name}")
        function = self._elf.function_at(entry)
        return Kernel(
            name=facts.name,
            descriptor=descriptor,
            descriptor_address=symbol.value,
            entry=entry,
            code_bytes=(function.past if function is not None else entry) - entry,
            arguments=self._arguments(facts),
            max_threads=facts.max_flat_workgroup_size,
            vector_registers=facts.vgpr_count,
            scalar_registers=facts.sgpr_count,
            accumulators=facts.agpr_count,
            vector_spills=facts.vgpr_spill_count,
            scalar_spills=facts.sgpr_spill_count,
        )

    def _arguments(self, facts: _KernelFacts) -> tuple[KernelArgument, ...]:
        limit = facts.kernarg_segment_size
        if len(facts.args) > MAX_ARGUMENTS or not 0 <= limit <= MAX_KERNARG_BYTES:
            what = f"{len(facts.args)} arguments in {limit} bytes"
            limits = f"limits {MAX_ARGUMENTS} and {MAX_KERNARG_BYTES}"
            raise BadCodeObject(self.name, f"has a kernel {facts.name} of {what}, {limits}")
        for place, part in enumerate(facts.args):
            if part.offset < 0 or part.size < 0 or part.offset + part.size > limit:
                where = f"argument {place} of {facts.name} at {part.offset}, {part.size} bytes"
                raise BadCodeObject(self.name, f"puts {where}, past its kernarg of {limit}")
        parts = [
            KernelArgument(part.name, part.value_kind, part.offset, part.size)
            for part in facts.args
        ]
        shown = [place for place, part in enumerate(parts) if not part.is_hidden]
        types = self._types.get(facts.name, ())
        if len(types) == len(shown):
            for place, of_number in zip(shown, types, strict=True):
                parts[place] = replace(parts[place], type=of_number)
        return tuple(parts)

    @cached_property
    def _types(self) -> Mapping[str, tuple[NumberType, ...]]:
        return parameter_types(self._elf)

    def _fill(self, memory: bytearray, at: int, kind: int, value: int) -> None:
        if kind not in (_ABSOLUTE, _RELATIVE):
            raise BadCodeObject(
                self.name, f"has a relocation of type {kind}, which is not known here"
            )
        if at + 8 > len(memory):
            raise BadCodeObject(
                self.name, f"fills a word at 0x{at:x}, past its {len(memory)} bytes"
            )
        memory[at : at + 8] = (value % (1 << 64)).to_bytes(8, "little")


def read_code_object(data: bytes, name: str, arch: str | None = None) -> CodeObject:
    """The code object in the bytes of a file; out of a bundle the one for `arch`.

    `name` is what messages call it. Raises BadCodeObject, also when it was made for another target.
    """
    if len(data) > MAX_OBJECT_BYTES:
        raise BadCodeObject(name, f"has {len(data)} bytes, limit {MAX_OBJECT_BYTES}")
    if data.startswith((MAGIC, COMPRESSED_MAGIC)):
        data = code_of_bundle(data, name, arch)
    found = CodeObject(data, name)
    if arch is not None and found.target.arch != arch:
        raise BadCodeObject(name, f"was made for {found.target}, not for {arch}")
    return found
