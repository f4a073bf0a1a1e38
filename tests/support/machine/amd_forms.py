"""What is wrong with a form of a kernel as an object of AMD's: names, meanings, waits, cases."""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.device.amd.evidence.waits import missing_waits
from hypocenter.device.amd.lower import Lowering
from hypocenter.device.amd.values.meanings import meanings
from machine.amd_objects import Compiled, differing
from machine.amd_references import BITS, FLAGS, NUMBERS, WHOLE, flat

#: Opcodes whose cases stand in `test_division.py`.
_DIVISION = {f"V_DIV_{step}_{form}" for step in ("SCALE", "FMAS") for form in ("F32", "F64")}


@dataclass(frozen=True, slots=True)
class Complaints:
    """Names that are not LLVM's, what is not modelled, waits that lack, and opcodes of a meaning
    without a case. Nothing is wrong where all are empty."""

    differing: list[tuple[str, str]]
    problems: list[str]
    waits: list[str]
    without_a_case: list[str]

    def __bool__(self) -> bool:
        return bool(self.differing or self.problems or self.waits or self.without_a_case)


def complaints(given: Compiled, arch: str) -> Complaints:
    """All of one object."""
    num_lanes = given.kernel.descriptor.wavefront
    lowered = Lowering(arch, num_lanes).lower(given.instructions)
    waits = [str(each) for each in missing_waits(lowered, arch, num_lanes)]
    problems = [str(each) for each in lowered.problems.values()]
    return Complaints(differing(given), problems, waits, _without_a_case(opcodes(given)))


def opcodes(given: Compiled) -> set[str]:
    """The names of an object's instructions, those of a pair apart."""
    return {part for each in given.instructions for part in each.name.split("::")}


def _without_a_case(names: set[str]) -> list[str]:
    known = meanings()
    cases = {known[name] for name in flat([BITS, WHOLE, NUMBERS, FLAGS])}
    return sorted(name for name in names - _DIVISION if name in known and known[name] not in cases)
