"""Slots of guarded launches on the host: the words in which a guard leaves what it saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypocenter.errors import HypoError
from hypocenter.records import AccessFault, GuardSite

# The format is that of guard_gpu.py.
_OFFSET_BITS = 36
_PROGRAM_BITS = 26
_NULL_BIT = 1 << 62
_FAULT_BIT = 1 << 63


def decode_slots(
    kernel: str, sites: Sequence[GuardSite], words: Any, grid: Sequence[int]
) -> list[AccessFault]:
    """The faults in the words of one launch, in the order of the sites.

    `words`: one-dimensional int64 on the host (numpy, torch on the CPU, or a list). Raises
    HypoError for a word that no guarded kernel writes: the slots were overwritten.
    """
    values: list[int] = words if isinstance(words, list) else words.tolist()
    if not any(values):
        return []
    faults = []
    for site in sites:
        for i, parameter in enumerate(site.parameters):
            if word := values[site.slot + i] & (2**64 - 1):
                faults.append(_decoded(kernel, site, parameter, word, grid))
    return faults


def _decoded(
    kernel: str, site: GuardSite, parameter: str, word: int, grid: Sequence[int]
) -> AccessFault:
    if not word & _FAULT_BIT:
        raise HypoError(
            f"{kernel}: slot {site.slot} of a guarded launch holds {word:#x}, which no guard "
            "writes; something else writes to the slots, or they were not zero before the launch"
        )
    offset = word & ((1 << _OFFSET_BITS) - 1)
    offset -= (offset >> (_OFFSET_BITS - 1)) << _OFFSET_BITS
    number = word >> _OFFSET_BITS & ((1 << _PROGRAM_BITS) - 1)
    x, y, z = (*grid, 1, 1)[:3]
    exact = x * y * z <= 1 << _PROGRAM_BITS
    program = (number % x, number // x % y, number // (x * y)) if exact else None
    return AccessFault(
        kernel=kernel,
        site=site,
        parameter=parameter,
        null=bool(word & _NULL_BIT),
        byte_offset=offset,
        program=program,
    )


def describe(fault: AccessFault) -> str:
    """One sentence and the call chain, innermost first, a line each."""
    site = fault.site
    if fault.null:
        what = f"{fault.parameter}, which is null or empty, at byte {fault.byte_offset}"
    else:
        what = f"byte {fault.byte_offset} of {fault.parameter}, outside its tensor"
    where = f"program {fault.program}" if fault.program else "a program (the grid is too large)"
    lines = [f"{fault.kernel}: {site.operation} of {what}, in {where}: {site.expression}"]
    lines += [f"  {call.file}:{call.line} in {call.function}" for call in site.calls]
    return "\n".join(lines)
