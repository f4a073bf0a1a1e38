"""Objects of the project's own kernels: decoded as LLVM writes them, nothing that is not modelled,
and no wait that is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine.amd_forms import complaints
from machine.amd_objects import (
    TARGETS,
    amd_forms,
    compiled,
    differing,
    first_forms,
    kernel_names,
)

from hypocenter.device.offline.specimen import Specimen

#: Few instructions, and wide ones of memory, masks and matrices.
FAST = ("narrow_kernel", "rope_write_kernel", "head_linear_kernel")
#: In how many parts the forms are divided that are no kernel's first one.
PARTS = 16


def _check(form: Specimen, arch: str) -> None:
    wrong = complaints(compiled(form, arch), arch)
    assert not wrong, (form.label, wrong)


@pytest.mark.tier("amd", fast=lambda case: case.name in FAST)
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", kernel_names())
def test_its_instructions_have_llvms_names_meanings_and_cases(name: str, arch: str) -> None:
    _check(first_forms()[name], arch)


@pytest.mark.tier("amd")
@pytest.mark.parametrize("part", range(PARTS), ids=lambda part: f"part{part + 1}of{PARTS}")
@pytest.mark.parametrize("arch", TARGETS)
def test_so_have_those_of_all_its_other_forms(arch: str, part: int) -> None:
    """A part of a target is `scripts/test-amd -k "other_forms and gfx942 and part1of16"`;
    `benchmarks/amd_forms.py` has all, in turns and on many cores."""
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
