"""Slots of guarded launches on the host: their word format, and a ring that gives each launch some.

Knows arrays only by what numpy and torch share (slices, assignment, `tolist`), and copies nothing
from a device: whoever reads a ring brings its words to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

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


class _Window(NamedTuple):
    kernel: str
    sites: tuple[GuardSite, ...]
    grid: tuple[int, ...]
    start: int
    num_slots: int


class SlotRing:
    """Words for the slots of many launches, read once per step.

    `words`: one-dimensional int64, zero, on the device that runs the launches. Every launch gets a
    window of its own, so the place of a word names its launch. Windows are handed out in order and
    come back all at once with `settle`; those of a captured graph stay with `settle(keep=True)`.
    """

    def __init__(self, words: Any) -> None:
        self.words = words
        self.num_words = len(words)
        self._windows: list[_Window] = []
        self._next = 0

    @property
    def num_pending(self) -> int:
        """Launches whose windows were not settled."""
        return len(self._windows)

    def claim(
        self, kernel: str, sites: tuple[GuardSite, ...], num_slots: int, grid: tuple[int, ...]
    ) -> Any:
        """The window of the next launch, a view of `words`.

        Raises HypoError when it would overlap one whose words have not been read.
        """
        if num_slots > self.num_words:
            raise HypoError(
                f"{kernel}: a guarded launch needs {num_slots} slots, but the ring has "
                f"{self.num_words} words; make the ring larger"
            )
        start = self._place(num_slots)
        if start is None:
            raise HypoError(
                f"{kernel}: the {num_slots} slots of this guarded launch would overwrite those of "
                f"{self._windows[0].kernel}, which were not read; {self.num_pending} launches wait "
                f"in {self.num_words} words: settle more often, or make the ring larger"
            )
        self._windows.append(_Window(kernel, sites, tuple(grid), start, num_slots))
        self._next = start + num_slots
        return self.words[start : start + num_slots]

    def _place(self, num_slots: int) -> int | None:
        """Where the next window begins; it does not wrap, and pending ones lie in order."""
        end = self._next + num_slots
        oldest = self._windows[0].start if self._windows else self.num_words
        if self._windows and self._next <= oldest:  # the newest windows lie before the oldest
            return self._next if end <= oldest else None
        if end <= self.num_words:
            return self._next
        return 0 if num_slots <= oldest else None

    def settle(self, host_words: Any | None = None, *, keep: bool = False) -> list[AccessFault]:
        """The faults of all pending launches in the order of launch; then the words are zero again.

        `host_words`: a copy of `words` on the host, taken after the launches have finished; may be
        left out when `words` lies there. With `keep` the windows stay claimed, for launches that
        run again.
        """
        values = (self.words if host_words is None else host_words).tolist()
        if len(values) != self.num_words:
            raise HypoError(f"the ring has {self.num_words} words, but {len(values)} were read")
        faults: list[AccessFault] = []
        for number, (kernel, sites, grid, start, num_slots) in enumerate(self._windows):
            window = values[start : start + num_slots]
            found = decode_slots(kernel, sites, window, grid)
            faults += (msgspec.structs.replace(fault, launch=number) for fault in found)
        if any(values):
            self.words[:] = 0
        if not keep:
            self._windows.clear()
        return faults
