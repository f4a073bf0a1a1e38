"""Lines of NVIDIA's kernel module that tell of broken hardware: card, error, what to do.

Numbers and what follows from each: the catalogue in NVIDIA's "Xid Errors", by its resolutions
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), and "GPU Memory Error Management"
(docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt). Other numbers, such as 13 and 31, are of programs,
and are not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

_LINE = re.compile(
    r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,20})[^)\n]{0,20}\): (\d{1,4}),(?: pid='?(\d{1,10}))?"
)


class XidFact(msgspec.Struct, frozen=True, kw_only=True):
    """What one number says. `ends_work`: what runs on the card then has lost data or the card."""

    meaning: str
    way_out: str
    ends_work: bool = True


_RESET = "stop what uses the card, and reset it (`nvidia-smi --gpu-reset -i {card}`)"
_REPLACE = "have the card tested and replaced if it comes again"

HARDWARE_XIDS: Mapping[int, XidFact] = {
    48: XidFact(
        meaning="an error of its memory that could not be corrected",
        way_out=f"{_RESET}; {_REPLACE}",
    ),
    63: XidFact(
        meaning="a broken row of its memory is marked to be replaced by a spare one",
        way_out="nothing at once: when nothing uses the card, reset it "
        "(`nvidia-smi --gpu-reset -i {card}`), which puts the spare row in place",
        ends_work=False,
    ),
    64: XidFact(
        meaning="a broken row of its memory could not be marked to be replaced",
        way_out=f"{_RESET}; {_REPLACE}",
        ends_work=False,
    ),
    74: XidFact(
        meaning="an error of an NVLink connection to another card",
        way_out=f"{_RESET}; have the connection checked if it comes again",
    ),
    79: XidFact(
        meaning="it has fallen off the bus: the host cannot reach it any more",
        way_out="restart the machine; check the card's seat, power and cooling if it comes again",
    ),
    94: XidFact(
        meaning="an error of its memory that could not be corrected, and harmed one program alone",
        way_out="start the program again; when nothing uses the card, reset it "
        "(`nvidia-smi --gpu-reset -i {card}`)",
    ),
    95: XidFact(
        meaning="an error of its memory that could not be corrected, and may harm every program",
        way_out=f"{_RESET} before anything else runs on it; {_REPLACE}",
    ),
    # These two say of a 48 which memory it was.
    171: XidFact(
        meaning="an error of its DRAM that could not be corrected",
        way_out=f"{_RESET}, which puts a spare row in place of a broken one; {_REPLACE}",
    ),
    172: XidFact(
        meaning="an error of its SRAM that could not be corrected",
        way_out=f"{_RESET}; have it tested and replaced if `nvidia-smi -q -d ECC` says that its "
        "SRAM threshold is exceeded",
    ),
}


class XidSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A number that a card reported; `pid` is None where the line names no process."""

    number: int
    card: str
    pid: int | None = None


def hardware_xids(lines: Iterable[str]) -> Iterator[XidSeen]:
    """Those of a kernel's log that are in HARDWARE_XIDS, in their order."""
    for line in lines:
        if (found := _LINE.search(line)) and int(found[2]) in HARDWARE_XIDS:
            pid = int(found[3]) if found[3] else None
            yield XidSeen(number=int(found[2]), card=found[1], pid=pid)
