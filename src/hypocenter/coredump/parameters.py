"""How the parameters of a kernel lie, by what the compiler wrote beside its code.

Section `.nv.info.KERNEL` of an image: attributes of a format, a number and a size each, of which
KPARAM_INFO tells of one parameter. So `cuobjdump -elf` shows them; tests hold nvcc's own to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from hypocenter.coredump.elf import Elf

#: Formats: none, a byte, two bytes, and a size that stands in the last two of four bytes.
_SIZED = 0x04
_HEAD = struct.Struct("<BBH")
#: Of KPARAM_INFO: index, place among the parameters, offset, and the size above 18 bits of flags.
_PARAMETER_ATTRIBUTE = 0x17
_PARAMETER = struct.Struct("<IHHI")
_SIZE_SHIFT = 18
_MAX_INFO_BYTES, _MAX_PARAMETERS = 1 << 16, 1024


def parameters_of(image: Elf, symbol: str) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of each parameter of a kernel, in order; empty where nothing tells."""
    section = image.section_of_name(f".nv.info.{symbol}") if symbol else None
    if section is None or section.num_bytes > _MAX_INFO_BYTES:
        return ()
    found = dict(_read_parameters(image.data(section)))
    is_whole = sorted(found) == list(range(len(found)))
    return tuple(found[place] for place in sorted(found)) if is_whole else ()


def _read_parameters(data: bytes) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each parameter by its place."""
    at = 0
    while at + _HEAD.size <= len(data):
        kind, attribute, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if kind != _SIZED:
            continue
        if attribute == _PARAMETER_ATTRIBUTE and size == _PARAMETER.size:
            if at + size > len(data):
                return
            _, place, offset, flags = _PARAMETER.unpack_from(data, at)
            if place < _MAX_PARAMETERS:
                yield place, (offset, flags >> _SIZE_SHIFT)
        at += size
