"""FP16_OVFL: finite numbers that are too large become the largest of halves and of 8 bits, however
a kernel gets into that mode; what is set too late, or not always, stops the machine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from machine.amd_wave import Wave, assembled, num_lanes_of
from repository import ROOT

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.code_object import read_code_object
from hypocenter.device.amd.executor import MachineProgram
from hypocenter.device.amd.lower import Lowering

TARGETS = ("gfx942", "gfx950", "gfx1100", "gfx1201")
_SET = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
_TOO_LARGE = np.array([65504.0, 65505.0, 7e4, -7e4, 1e30, np.inf, -np.inf, np.nan], np.float32)


def _converts(arch: str, dest: int, source: int) -> str:
    """A number to a half; RDNA's assembler wants to know to which one."""
    low = ".l" if arch.startswith("gfx1") else ""
    return f"v_cvt_f16_f32 v{dest}{low}, v{source}\n"


def _halves(arch: str, lines: str, *operands: Array) -> Array:
    wave = Wave(arch)
    for register, values in enumerate(operands, 1):
        wave.put(register, values)
    assert wave.run(lines) == r.ALL_ENDED
    return wave.get(6, "f2", 1)[: len(operands[0]), 0]


@pytest.mark.parametrize("arch", TARGETS)
def test_a_half_stops_at_the_largest_one_and_infinity_stays(arch: str) -> None:
    held = [65504.0, 65504.0, 65504.0, -65504.0, 65504.0, np.inf, -np.inf, np.nan]
    plain = [65504.0, 65504.0, np.inf, -np.inf, np.inf, np.inf, -np.inf, np.nan]
    for begin, wanted in ((_SET, held), ("", plain)):
        found = _halves(arch, begin + _converts(arch, 6, 1), _TOO_LARGE)
        np.testing.assert_array_equal(found, np.array(wanted, np.float16))
    big = np.array([6e4, -6e4, np.inf, 1.0], np.float16).view(np.uint16).astype(np.uint32)
    low = ".l" if arch.startswith("gfx1") else ""
    added = _halves(arch, f"{_SET}v_add_f16 v6{low}, v1{low}, v1{low}", big)
    np.testing.assert_array_equal(added, np.array([65504, -65504, np.inf, 2], np.float16))
    both = big | big << 16
    for line in ("v_pk_add_f16 v6, v1, v1", "v_pk_fma_f16 v6, v1, 1.0, v1"):
        found = _halves(arch, f"{_SET}{line}", both)
        np.testing.assert_array_equal(found, added)


@pytest.mark.parametrize("kind", ["fp8", "bf8"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1201"])
def test_numbers_of_8_bits_stop_at_the_largest_one(arch: str, kind: str) -> None:
    is_fnuz = arch == "gfx942"
    top = (0x7F if is_fnuz else 0x7E) if kind == "fp8" else 0x7F if is_fnuz else 0x7B
    infinity = 0x80 if is_fnuz else 0x7F if kind == "fp8" else 0x7C
    given = np.array([1e30, -1e6, np.inf, 1.0], np.float32)
    found = []
    for begin in (_SET, ""):
        wave = Wave(arch)
        wave.put(1, given)
        assert wave.run(f"{begin}v_cvt_pk_{kind}_f32 v6, v1, v1") == r.ALL_ENDED
        found.append((wave.get(6, "u4")[:4, 0] & 255).tolist())
    assert found[0][:3] == [top, top | 0x80, infinity]
    assert found[1][:2] != found[0][:2]
    assert found[1][2:] == found[0][2:]


def _problems(arch: str, lines: str, *, clamps: bool = False) -> list[str]:
    lowering = Lowering(arch, num_lanes_of(arch), clamps=clamps)
    return list(lowering.lower(assembled(lines, arch)).problems.values())


_NOTHING = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, {}), {}"


@pytest.mark.parametrize("arch", TARGETS)
def test_what_is_set_too_late_or_not_always_stops_the_machine(arch: str) -> None:
    told, converts = ["S_SETREG_IMM32_B32"], _converts(arch, 1, 2)
    assert _problems(arch, converts + _SET) == told
    assert _problems(arch, f"s_cbranch_scc0 end\n{_SET}{converts}end:\ns_nop 0") == told
    assert _problems(arch, _SET + converts + _SET.replace("), 1", "), 0")) == told * 2
    assert _problems(arch, converts + _SET, clamps=True) == []
    assert _problems(arch, f"begin:\ns_nop 0\n{_SET}{converts}s_cbranch_scc0 begin") == []


@pytest.mark.parametrize("arch", TARGETS)
def test_rounding_and_denormals_may_be_set_to_what_they_are(arch: str) -> None:
    for field, value in (("4, 4", 15), ("0, 4", 0), ("0, 8", 240)):
        assert _problems(arch, _NOTHING.format(field, value)) == []
    for field, value in (("4, 4", 12), ("0, 2", 3), ("8, 1", 0)):
        assert _problems(arch, _NOTHING.format(field, value)) == ["S_SETREG_IMM32_B32"]


def test_poles_and_output_factors_stop_the_machine_in_that_mode() -> None:
    for line in ("v_rcp_f16 v1, v2", "v_log_f16 v1, v2", "v_add_f16 v1, v2, v3 mul:2"):
        assert _problems("gfx942", line) == []
        (problem,) = _problems("gfx942", _SET + line)
        assert problem.endswith("in the mode FP16_OVFL")


def test_a_descriptor_sets_it_too() -> None:
    path = ROOT / "tests" / "fixtures" / "amd" / "saxpy.bundle"
    given = read_code_object(path.read_bytes(), "saxpy.bundle", "gfx942")
    kernel = given.kernel("saxpy")
    changed = dataclasses.replace(kernel.descriptor, rsrc1=kernel.descriptor.rsrc1 | 1 << 26)
    program = MachineProgram(given, dataclasses.replace(kernel, descriptor=changed))
    assert program.lowered.problems == {}
