"""Scalar registers, masks of lanes, and what is not modelled: which is named and stops the wave."""

from __future__ import annotations

import numpy as np
import pytest
from machine.amd_objects import TARGETS
from machine.amd_wave import Wave, assembled, num_lanes_of

from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd.decode import Instruction
from hypocenter.device.amd.lower import Lowering

_ACTIVE = 0xF0F7_3355_9BCD_EF17
_VCC, _EXEC = 106, 126
CDNA, RDNA = ("gfx942", "gfx950"), ("gfx1100", "gfx1201")


def _wave(arch: str) -> Wave:
    wave, rng = Wave(arch, active=_ACTIVE), np.random.default_rng(12)
    wave.vgpr[:] = rng.integers(0, 1 << 32, wave.vgpr.shape, np.uint32)
    wave.sgpr[:] = rng.integers(0, 1 << 32, wave.sgpr.shape)
    return wave


@pytest.mark.parametrize("arch", TARGETS)
def test_two_registers_are_one_wide_number(arch: str) -> None:
    wave = _wave(arch)
    wanted = wave.sgpr.copy()
    assert wave.run("s_mov_b64 s[8:9], s[4:5]\ns_lshl_b64 s[10:11], s[6:7], s3") == r.ALL_ENDED
    shifted = int(wanted[6] | wanted[7] << 32) << (int(wanted[3]) & 63)
    wanted[8:10] = wanted[4:6]
    wanted[10], wanted[11] = shifted & 0xFFFFFFFF, shifted >> 32 & 0xFFFFFFFF
    np.testing.assert_array_equal(wave.sgpr[:_EXEC], wanted[:_EXEC])


@pytest.mark.parametrize(("low", "high"), [(0, 0), (5, 0), (0, 9), (4, 8)])
@pytest.mark.parametrize("arch", TARGETS)
def test_flags_are_numbers_too(arch: str, low: int, high: int) -> None:
    """SCC, and on CDNA whether VCC and EXEC are empty, can be operands."""
    wave = _wave(arch)
    wave.sgpr[_VCC], wave.sgpr[_VCC + 1] = low, high
    wave.scc = 1
    lines = ["s_mov_b32 s8, src_scc"]
    if arch in CDNA:
        lines += ["s_mov_b32 s9, src_vccz", "s_mov_b32 s10, src_execz", "s_mov_b64 exec, vcc"]
        lines += ["s_mov_b32 s11, src_execz"]
    assert wave.run("\n".join(lines)) == r.ALL_ENDED
    assert wave.sgpr[8] == 1
    if arch in CDNA:
        is_empty = low == high == 0
        assert [int(value) for value in wave.sgpr[9:12]] == [is_empty, 0, is_empty]


@pytest.mark.parametrize("place", ["vcc", "s[8:9]"])
@pytest.mark.parametrize("arch", TARGETS)
def test_a_comparison_leaves_a_bit_of_each_active_lane(arch: str, place: str) -> None:
    wave = _wave(arch)
    lanes, first = wave.num_lanes, _VCC if place == "vcc" else 8
    if lanes == 32:
        place = "vcc_lo" if place == "vcc" else "s8"
    wanted = wave.sgpr.copy()
    bits = sum(
        1 << n for n in range(lanes) if _ACTIVE >> n & 1 and wave.vgpr[2, n] < wave.vgpr[3, n]
    )
    wanted[first] = bits & 0xFFFFFFFF
    if lanes == 64:
        wanted[first + 1] = bits >> 32
    registers = wave.vgpr.copy()
    lines = [f"v_cmp_lt_u32 {place}, v2, v3", f"v_cndmask_b32 v1, v2, v3, {place}"]
    for n in range(lanes):
        if _ACTIVE >> n & 1:
            registers[1, n] = registers[3 if bits >> n & 1 else 2, n]
    assert wave.run("\n".join(lines)) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.sgpr[:_EXEC], wanted[:_EXEC])
    np.testing.assert_array_equal(wave.vgpr, registers)


@pytest.mark.parametrize("arch", TARGETS)
def test_a_mask_is_kept_while_another_one_is_in_force(arch: str) -> None:
    wave = _wave(arch)
    is_wide, had = wave.num_lanes == 64, _ACTIVE & (1 << wave.num_lanes) - 1
    given = int(wave.sgpr[4]) | int(wave.sgpr[5]) << 32
    lines = "s_and_saveexec_b64 s[8:9], s[4:5]" if is_wide else "s_and_saveexec_b32 s8, s4"
    wanted = wave.sgpr.copy()
    wanted[8], wanted[_EXEC] = had & 0xFFFFFFFF, given & had & 0xFFFFFFFF
    wanted[_EXEC + 1] = 0
    if is_wide:
        wanted[9], wanted[_EXEC + 1] = had >> 32, (given & had) >> 32
    assert wave.run(lines) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.sgpr, wanted)
    assert wave.scc == 1


_NOT_MODELLED = [
    ("gfx942", "s_memtime s[4:5]", "S_MEMTIME"),
    ("gfx942", "buffer_load_format_x v1, off, s[4:7], 0", "BUFFER_LOAD_FORMAT_X"),
    ("gfx1100", "v_permlane64_b32 v1, v2", "V_PERMLANE64_B32"),
    ("gfx942", "ds_read_addtid_b32 v1", "DS_READ_ADDTID_B32"),
    ("gfx942", "ds_swizzle_b32 v1, v2 offset:0xe000", "DS_SWIZZLE_B32 with offset"),
    ("gfx942", "ds_cmpst_f32 v2, v3, v4", "DS_CMPST_F32"),
    ("gfx950", "ds_read_b64_tr_b4 v[2:3], v1", "DS_READ_B64_TR_B4"),
    ("gfx1100", "buffer_load_b32 v[2:3], off, s[4:7], 0 tfe", "BUFFER_LOAD_B32"),
    # What changes how denormals are taken, while a wave runs.
    ("gfx942", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 4), 0", "S_SETREG_IMM32_B32"),
    ("gfx942", "s_setreg_b32 hwreg(HW_REG_MODE, 4, 4), s4", "S_SETREG_B32"),
    ("gfx1100", "s_denorm_mode 0", "S_DENORM_MODE"),
    ("gfx1201", "s_round_mode 1", "S_ROUND_MODE"),
    # Words of LDS as an operand, which EXPCNT counts.
    ("gfx1100", "lds_direct_load v1 wait_vdst:15", "LDS_DIRECT_LOAD"),
    ("gfx1201", "ds_direct_load v1 wait_va_vdst:15 wait_vm_vsrc:1", "DS_DIRECT_LOAD"),
    # Signs and constants of pairs of bfloat16.
    ("gfx1100", "v_dot2_bf16_bf16 v5, -v1, v2, v3", "V_DOT2_BF16_BF16 with a sign"),
    ("gfx1201", "v_dot2_bf16_bf16 v5, v1, v2, |v3|", "V_DOT2_BF16_BF16 with a sign"),
    ("gfx1201", "v_dot2_bf16_bf16 v5, v1, v2, 1.0", "V_DOT2_BF16_BF16 with a constant"),
    ("gfx1100", "exp mrt0 v0, v1, v2, v3 done", "EXP"),
]


@pytest.mark.parametrize(("arch", "line", "name"), _NOT_MODELLED)
def test_what_is_not_modelled_stops_the_wave_by_name(arch: str, line: str, name: str) -> None:
    lowered = Lowering(arch, num_lanes_of(arch)).lower(assembled(line, arch))
    assert [name in why for why in lowered.problems.values()] == [True], lowered.problems
    (row,) = lowered.problems
    assert lowered.code[row, r.KIND] == r.UNKNOWN


def test_a_store_by_scalars_is_not_taken_for_a_load() -> None:
    """No assembler of these targets writes it, and their tables have it."""
    fields = {"sbase": 2, "sdata": 4, "imm": 1, "offset": 0}
    store = Instruction(0, "S_STORE_DWORD", "SMEM", fields, 8, bytes(8))
    assert Lowering("gfx942", 64).lower([store]).problems == {0: "S_STORE_DWORD"}
