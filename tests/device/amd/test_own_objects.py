"""Objects of the project's own kernels: decoded as LLVM writes them, nothing that is not modelled,
and no wait that is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine.amd_objects import (
    TARGETS,
    Compiled,
    amd_forms,
    compiled,
    differing,
    first_forms,
    kernel_names,
)
from machine.amd_references import BITS, FLAGS, NUMBERS, WHOLE, flat

from hypocenter.device.amd.evidence.waits import missing_waits
from hypocenter.device.amd.lower import Lowered, Lowering
from hypocenter.device.amd.values.meanings import meanings
from hypocenter.device.offline.specimen import Specimen

#: Few instructions, and wide ones of memory, masks and matrices.
FAST = ("narrow_kernel", "rope_write_kernel", "head_linear_kernel")
#: In how many parts the forms are divided that are no kernel's first one.
PARTS = 16
#: Opcodes whose cases stand in `test_division.py`.
_DIVISION = {f"V_DIV_{step}_{form}" for step in ("SCALE", "FMAS") for form in ("F32", "F64")}


def _lowered(arch: str, given: Compiled) -> Lowered:
    return Lowering(arch, given.kernel.descriptor.wavefront).lower(given.instructions)


def _without_a_case(given: Compiled) -> set[str]:
    known = meanings()
    cases = {known[name] for name in flat([BITS, WHOLE, NUMBERS, FLAGS])}
    names = {part for each in given.instructions for part in each.name.split("::")}
    return {name for name in names - _DIVISION if name in known and known[name] not in cases}


def _check(form: Specimen, arch: str) -> None:
    given = compiled(form, arch)
    assert differing(given) == [], form.label
    lowered = _lowered(arch, given)
    assert lowered.problems == {}, form.label
    num_lanes = given.kernel.descriptor.wavefront
    assert missing_waits(lowered, arch, num_lanes) == [], form.label
    assert _without_a_case(given) == set(), form.label


@pytest.mark.tier("amd", fast=lambda case: case.name in FAST)
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", kernel_names())
def test_its_instructions_have_llvms_names_meanings_and_cases(name: str, arch: str) -> None:
    _check(first_forms()[name], arch)


@pytest.mark.tier("amd")
@pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"part{part + 1}of{PARTS}")
@pytest.mark.parametrize("arch", TARGETS)
def test_so_have_those_of_all_its_other_forms(arch: str, part: int) -> None:
    """A part of a target is `scripts/test-amd -k "other_forms and gfx942 and part1of16"`."""
    others = [form for form in amd_forms() if form is not first_forms()[form.name]]
    assert len(others) >= PARTS
    for form in others[part::PARTS]:
        _check(form, arch)


@pytest.mark.tier("amd")
def test_each_kernel_is_launched_on_amds_gpus() -> None:
    assert sorted(first_forms()) == kernel_names()


def test_an_instruction_of_another_name_is_told() -> None:
    given = compiled(first_forms()["narrow_kernel"], "gfx942")
    place = next(i for i, e in enumerate(given.instructions) if e.name.startswith("V_"))
    changed = list(given.instructions)
    changed[place] = replace(changed[place], name="V_NOP")
    assert [pair[0] for pair in differing(replace(given, instructions=changed))] == ["v_nop"]
    shorter = replace(given, instructions=given.instructions[:-1])
    assert differing(shorter) == [("", "s_endpgm")]
