"""Where operands of a kernel's instructions lie, and the tables of lanes that its rows share."""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.constants import inline_constant, literal_value
from hypocenter.device.amd.decode import FAMILIES, Instruction, NotModelled

#: No operand of AMD's: the constant of SOPK.
SIMM = 1000


class KernelPlaces:
    """Places and tables of one kernel: what all that makes its rows has to know."""

    def __init__(self, arch: str, num_lanes: int) -> None:
        self.arch, self.family, self.num_lanes = arch, FAMILIES[arch], num_lanes
        self.is_rdna = self.family != "cdna"
        self._tables: dict[tuple[int, ...], int] = {}

    @property
    def tables(self) -> list[tuple[int, ...]]:
        """All tables, by their numbers."""
        return [*self._tables]

    def table(self, sources: Sequence[int]) -> int:
        """The number of a table of source lanes."""
        key = tuple(sources)
        return self._tables.setdefault(key, len(self._tables))

    def place(self, number: int, kind: str, each: Instruction) -> tuple[int, int]:
        """Where an operand's value is: a kind of place, and which one or the value itself."""
        if number == SIMM:
            value = each.get("simm16")
            is_unsigned = each.name.startswith("S_CMPK_") and kind == "u32"
            return r.CONSTANT, value if is_unsigned else value - ((value >> 15) << 16)
        if number >= 256:
            return r.VGPR, number - 256
        if self.is_rdna and number == 124:
            return r.CONSTANT, 0
        if number < 128:
            return r.SGPR, number
        if number == 255:
            return r.CONSTANT, literal_value(each.get("literal"), kind)
        if (constant := inline_constant(number, kind)) is not None:
            return r.CONSTANT, constant
        special = {253: r.SCC, 251: r.VCCZ, 252: r.EXECZ}
        if number not in special:
            raise NotModelled(f"{each.name} with operand {number}")
        return special[number], 0
