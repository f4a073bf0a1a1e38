"""Code objects with one instruction taken away: S_NOP stands in its place."""

from __future__ import annotations

from hypocenter.device.amd.code_object import read_code_object
from hypocenter.device.amd.decode import FAMILIES, Instruction, decode
from hypocenter.device.amd.evidence.waits import counters_left

_NOP = bytes.fromhex("000080bf")


def instructions_of(data: bytes, name: str | None = None) -> list[Instruction]:
    """Those of a kernel, or of an object's only one."""
    code = read_code_object(data, "code")
    kernel = code.kernel(name)
    image = bytes(code.memory_image(0))[kernel.entry : kernel.entry + kernel.code_bytes]
    return decode(image, code.target.arch, kernel.entry)


def without(data: bytes, taken: Instruction, name: str | None = None) -> bytes:
    """The object with S_NOP for each word of an instruction of the kernel."""
    code = read_code_object(data, "code")
    kernel = code.kernel(name)
    image = bytes(code.memory_image(0))[kernel.entry : kernel.entry + kernel.code_bytes]
    assert data.count(image) == 1
    at = data.index(image) + taken.pc - kernel.entry
    end = at + taken.num_bytes
    assert data[at:end] == taken.data
    return data[:at] + _NOP * (taken.num_bytes // 4) + data[end:]


def without_each_wait(data: bytes, name: str | None = None) -> list[tuple[Instruction, bytes]]:
    """An object for each wait of the kernel, and the wait that it lacks."""
    family = FAMILIES[read_code_object(data, "code").target.arch]
    taken = [each for each in instructions_of(data, name) if counters_left(each, family)]
    return [(each, without(data, each, name)) for each in taken]
