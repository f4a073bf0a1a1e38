"""How many opcodes of each AMD target are modelled, as the table in docs/amd.md:
`python -m tools.amd_opcodes` writes it. The opcodes are those of the decoder, without what the
target lacks. One is modelled where the machine has a row for it in an encoding without modifiers.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from hypocenter.device.amd.decode import FAMILIES, Instruction, NotModelled, _formats
from hypocenter.device.amd.lower import Lowering
from hypocenter.device.amd.target_opcodes import has_opcode

PAGE = Path(__file__).parent.parent / "docs" / "amd.md"
#: Kinds by how names begin, the more specific first.
_KINDS = {
    "products of matrices": r"V_(MFMA|SMFMAC|WMMA|SWMMAC)_",
    "vector values": r"V_",
    "memory": r"(GLOBAL|FLAT|SCRATCH|BUFFER|TBUFFER)_|S_(LOAD|BUFFER|SCRATCH|STORE|ATOMIC)_",
    "LDS": r"DS_|LDS_",
    "scalars, control": r"",
}
_HEAD = "| opcodes modelled, of those that there are |"
#: Fields that hold vector registers, of which number 0 is written 256.
_REGISTERS = re.compile(r"v(dst|data|addr|src\d?)|data\d?|addr|src\d")
_SCALAR_DESTS = ("V_READLANE_B32", "V_READFIRSTLANE_B32")


def _plain_instructions(arch: str) -> Iterator[Instruction]:
    """Each opcode in each encoding, without modifiers; pairs (VOPD) by their first half."""
    for encoding in _formats(FAMILIES[arch]):
        if encoding.__name__.endswith(("DPP8", "DPP16", "_SDWA", "_LIT")):
            continue
        fields = dict(encoding._fields)
        op = fields.get("op")
        if op is None:
            continue
        names = [name for name in fields if name not in ("encoding", "op", "seg")]
        values = {name: 256 if _REGISTERS.fullmatch(name) else 0 for name in names}
        for each in op.allowed or op._enum:
            name = each.name.removesuffix("_E32").removesuffix("_E64")
            if not has_opcode(arch, name):
                continue
            own = values | {"vdst": 0} if name in _SCALAR_DESTS else values
            yield Instruction(0, name, encoding.__name__, own, 8, bytes(8))


@cache
def stopping(arch: str) -> tuple[set[str], set[str]]:
    """The names of a target that stop the machine in every encoding, and all its names."""
    lowered: defaultdict[str, list[bool]] = defaultdict(list)
    num_lanes = 64 if FAMILIES[arch] == "cdna" else 32
    for each in _plain_instructions(arch):
        try:
            Lowering(arch, num_lanes)._rows(each)
        except NotModelled:
            lowered[each.name].append(False)
        else:
            lowered[each.name].append(True)
    return {name for name, found in lowered.items() if not any(found)}, set(lowered)


def table() -> list[str]:
    """The table's lines."""
    every, modelled = {}, {}
    for arch in FAMILIES:
        stops, names = stopping(arch)
        every[arch] = Counter(map(_kind, names))
        modelled[arch] = Counter(map(_kind, names - stops))
    lines = [f"{_HEAD} {' | '.join(FAMILIES)} |", "|---|" + "---|" * len(FAMILIES)]
    for kind in _KINDS:
        counts = (f"{modelled[arch][kind]} of {every[arch][kind]}" for arch in FAMILIES)
        lines.append(f"| {kind} | {' | '.join(counts)} |")
    sums = (f"{modelled[arch].total()} of {every[arch].total()}" for arch in FAMILIES)
    return [*lines, f"| all | {' | '.join(sums)} |"]


def _kind(name: str) -> str:
    return next(kind for kind, begins in _KINDS.items() if re.match(begins, name))


def replaced(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(_HEAD)
    after = rest.partition("\n\n")[2]
    return before + "\n".join(table()) + "\n\n" + after


def main() -> int:
    PAGE.write_text(replaced(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
