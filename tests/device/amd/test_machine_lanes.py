"""What moves values between lanes, beside the lane that each manual's words name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from machine.amd_objects import TARGETS
from machine.amd_wave import Wave, assembled, num_lanes_of

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r
from hypocenter.device.amd import routes
from hypocenter.device.amd.lower import Lowering

_ACTIVE = 0xF0F7_3355_9BCD_EF17
_ALL = (1 << 64) - 1
CDNA, RDNA = ("gfx942", "gfx950"), ("gfx1100", "gfx1201")


def _wave(arch: str, active: int = _ACTIVE) -> Wave:
    wave = Wave(arch, active=active)
    wave.vgpr[:] = np.random.default_rng(8).integers(0, 1 << 32, wave.vgpr.shape, np.uint32)
    return wave


#: A DPP control: its text, the source of a lane (None for none), where it exists.
_DPP: list[tuple[str, Callable[[int], int | None], tuple[str, ...]]] = [
    ("quad_perm:[2,0,3,1]", lambda n: n // 4 * 4 + (2, 0, 3, 1)[n % 4], TARGETS),
    ("row_shl:1", lambda n: n + 1 if n % 16 < 15 else None, TARGETS),
    ("row_shl:3", lambda n: n + 3 if n % 16 + 3 < 16 else None, TARGETS),
    ("row_shr:5", lambda n: n - 5 if n % 16 >= 5 else None, TARGETS),
    ("row_ror:7", lambda n: n // 16 * 16 + (n - 7) % 16, TARGETS),
    ("row_mirror", lambda n: n ^ 15, TARGETS),
    ("row_half_mirror", lambda n: n ^ 7, TARGETS),
    ("row_newbcast:9", lambda n: n // 16 * 16 + 9, CDNA),
    ("row_share:9", lambda n: n // 16 * 16 + 9, RDNA),
    ("row_xmask:6", lambda n: n ^ 6, RDNA),
    ("wave_shl:1", lambda n: n + 1 if n < 63 else None, CDNA),
    ("wave_rol:1", lambda n: (n + 1) % 64, CDNA),
    ("wave_shr:1", lambda n: n - 1 if n else None, CDNA),
    ("wave_ror:1", lambda n: (n - 1) % 64, CDNA),
    ("row_bcast:15", lambda n: n // 16 * 16 - 1 if n >= 16 else None, CDNA),
    ("row_bcast:31", lambda n: 31 if n >= 32 else None, CDNA),
]


#: Registers of numbers of 64 bits: the first of where they go, and of where they come from.
_PAIRS = ((4, 2), (6, 0))


@pytest.mark.parametrize("arch", TARGETS)
def test_dpp_takes_the_lane_of_its_control(arch: str) -> None:
    for text, source_of, archs in _DPP:
        for zero in (False, True):
            for rows, banks in ((0xF, 0xF), (0xD, 0xF), (0xF, 0x6)):
                if arch not in archs:
                    continue
                wave = _wave(arch)
                wanted = wave.vgpr.copy()
                for lane in range(wave.num_lanes):
                    is_in = rows >> lane // 16 & 1 and banks >> lane % 16 // 4 & 1
                    if not _ACTIVE >> lane & 1 or not is_in:
                        continue
                    source = source_of(lane)
                    if source is not None and _ACTIVE >> source & 1:
                        wanted[1, lane] = wave.vgpr[2, source]
                    elif zero:
                        wanted[1, lane] = 0
                end = f"{text} row_mask:{rows:#x} bank_mask:{banks:#x}"
                line = f"v_mov_b32_dpp v1, v2 {end}{' bound_ctrl:1' if zero else ''}"
                assert wave.run(line) == r.ALL_ENDED, line
                np.testing.assert_array_equal(wave.vgpr, wanted, line)


@pytest.mark.parametrize("arch", CDNA)
def test_dpp_takes_both_words_of_numbers_of_64_bits(arch: str) -> None:
    """Nothing of the instruction before is left in them."""
    wave = _wave(arch)
    wanted = wave.vgpr.copy()
    end = "row_newbcast:9 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    lines = [f"v_mov_b64_dpp v[{to}:{to + 1}], v[{of}:{of + 1}] {end}" for to, of in _PAIRS]
    for lane in range(wave.num_lanes):
        source = lane // 16 * 16 + 9
        if _ACTIVE >> lane & 1:
            for to, of in _PAIRS:
                is_there = _ACTIVE >> source & 1
                wanted[to : to + 2, lane] = wave.vgpr[of : of + 2, source] if is_there else 0
    assert wave.run("\n".join(lines)) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)


@pytest.mark.parametrize("is_rdna", [False, True])
def test_a_control_that_is_none_of_dpps_has_no_table(is_rdna: bool) -> None:
    others = [0x100, 0x110, 0x120, 0x131, 0x142 if is_rdna else 0x160, 0x144, 0x170, 0x1FF]
    assert [routes.dpp_table(each, 64, is_rdna=is_rdna) for each in others] == [None] * len(others)
    assert routes.dpp_table(0xFF, 64, is_rdna=is_rdna) == [n // 4 * 4 + 3 for n in range(64)]


@pytest.mark.parametrize("reads_all", [False, True])
@pytest.mark.parametrize(
    "name", ["v_mov_b32_dpp v1", "v_add_nc_u32_dpp v1", "v_sub_nc_u32_e64_dpp v1"]
)
@pytest.mark.parametrize("arch", RDNA)
def test_dpp8_takes_a_lane_of_its_group(arch: str, name: str, reads_all: bool) -> None:
    wave, chosen = _wave(arch), (7, 1, 4, 4, 0, 2, 6, 3)
    wanted, other = wave.vgpr.copy(), wave.vgpr[3]
    for lane in range(32):
        if _ACTIVE >> lane & 1:
            source = lane // 8 * 8 + chosen[lane % 8]
            is_read = reads_all or _ACTIVE >> source & 1
            value = int(wave.vgpr[2, source]) if is_read else 0
            sign = {"v_mov": 0, "v_add": 1, "v_sub": -1}[name[:5]]
            wanted[1, lane] = (value + sign * int(other[lane])) % (1 << 32)
    line = f"{name}, v2{'' if 'mov' in name else ', v3'} dpp8:[{','.join(map(str, chosen))}]"
    assert wave.run(line + (" fi:1" if reads_all else "")) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)


@pytest.mark.parametrize("arch", RDNA)
def test_long_encodings_route_lanes_too(arch: str) -> None:
    if arch == "gfx1100":
        lines = "v_sub_nc_u32_e64_dpp v1, v2, v3 row_mirror row_mask:0xf bank_mask:0xf"
    else:
        lines = "v_sub_nc_u32_e64_dpp v1, v2, s4 row_mirror row_mask:0xf bank_mask:0xf"
    wave = _wave(arch, _ALL)
    wave.sgpr[4] = 0xABC
    second = wave.vgpr[3, :32] if arch == "gfx1100" else np.uint32(0xABC)
    wanted = wave.vgpr[2, np.arange(32) ^ 15] - second
    assert wave.run(lines) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr[1, :32], wanted)


@pytest.mark.parametrize("arch", TARGETS)
def test_a_lane_reads_another_lane_by_its_address(arch: str) -> None:
    wave = _wave(arch)
    lanes = wave.num_lanes
    wave.vgpr[2] = np.random.default_rng(1).integers(0, 1 << 10, 64)
    wanted = wave.vgpr.copy()
    for lane in range(lanes):
        source = (int(wave.vgpr[2, lane]) + 8) // 4 % lanes
        if _ACTIVE >> lane & 1:
            wanted[1, lane] = wave.vgpr[3, source] if _ACTIVE >> source & 1 else 0
    assert wave.run("ds_bpermute_b32 v1, v2, v3 offset:8") == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)


@pytest.mark.parametrize("arch", TARGETS)
def test_a_lane_pushes_its_value_to_another(arch: str) -> None:
    wave = _wave(arch)
    lanes = wave.num_lanes
    wave.vgpr[2] = np.random.default_rng(1).integers(0, 1 << 10, 64)
    pushed = np.zeros(64, np.uint32)
    for lane in range(lanes):
        if _ACTIVE >> lane & 1:
            pushed[(int(wave.vgpr[2, lane]) + 12) // 4 % lanes] = wave.vgpr[3, lane]
    wanted = wave.vgpr.copy()
    for lane in range(lanes):
        if _ACTIVE >> lane & 1:
            wanted[1, lane] = pushed[lane]
    assert wave.run("ds_permute_b32 v1, v2, v3 offset:12") == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)


_SWIZZLES: list[tuple[str, Callable[[int], int]]] = [
    ("swizzle(QUAD_PERM, 3, 1, 0, 2)", lambda n: n // 4 * 4 + (3, 1, 0, 2)[n % 4]),
    ("swizzle(SWAP, 8)", lambda n: n ^ 8),
    ("swizzle(REVERSE, 16)", lambda n: n ^ 15),
    ("swizzle(BROADCAST, 8, 3)", lambda n: n // 8 * 8 + 3),
    ("0x1f", lambda n: n),
    ("swizzle(BITMASK_PERM, \"01pip\")", lambda n: n // 32 * 32 + (n & 7 ^ 2 | 8)),
]  # fmt: skip


@pytest.mark.parametrize("arch", TARGETS)
def test_a_swizzle_takes_the_lane_of_its_pattern(arch: str) -> None:
    for text, source_of in _SWIZZLES:
        wave = _wave(arch)
        wanted = wave.vgpr.copy()
        for lane in range(wave.num_lanes):
            source = source_of(lane)
            if _ACTIVE >> lane & 1:
                wanted[1, lane] = wave.vgpr[2, source] if _ACTIVE >> source & 1 else 0
        assert wave.run(f"ds_swizzle_b32 v1, v2 offset:{text}") == r.ALL_ENDED, text
        np.testing.assert_array_equal(wave.vgpr, wanted, text)


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize(("by", "kept"), [(3, 0), (1, 8), (31, 5), (0, 0), (16, 24)])
def test_a_swizzle_turns_lanes_in_a_ring(by: int, kept: int, is_back: bool) -> None:
    """Bits of a lane's number that are kept are its own, the others are those of a lane `by` on."""
    offset = 0xC000 | is_back << 10 | by << 5 | kept
    wanted = []
    for lane in range(64):
        turned = (lane + (-by if is_back else by)) % 32
        bits = [(lane if kept >> i & 1 else turned) >> i & 1 for i in range(5)]
        wanted.append(lane // 32 * 32 + sum(bit << i for i, bit in enumerate(bits)))
    assert routes.swizzle_table(offset) == wanted
    assert routes.swizzle_table(0xE000) is None
    assert routes.swizzle_table(0xDFFF) is not None


@pytest.mark.parametrize("arch", TARGETS)
def test_a_register_of_number_0_is_read_and_written_as_others_are(arch: str) -> None:
    wave = _wave(arch, _ACTIVE & ~0x1FF)  # the first active lane has an odd number
    wave.sgpr[4] = 7
    before = wave.vgpr.copy()
    lines = ["v_readlane_b32 s0, v2, 5", "v_readfirstlane_b32 s9, v0", "v_writelane_b32 v0, s4, 13"]
    assert wave.run("\n".join(lines)) == r.ALL_ENDED
    first = next(n for n in range(9, 64) if _ACTIVE >> n & 1)
    assert first % 2 == 1
    assert [int(wave.sgpr[0]), int(wave.sgpr[9])] == [before[2, 5], before[0, first]]
    before[0, 13] = 7
    np.testing.assert_array_equal(wave.vgpr, before)


@pytest.mark.parametrize("arch", TARGETS)
def test_of_a_lane_that_is_read_into_nothing_only_rdna_knows(arch: str) -> None:
    """Register 124 is none there, and M0 is 125; no assembler takes either of them here."""
    given = assembled("v_readfirstlane_b32 s10, v2", arch)
    for place in (124, 125):
        changed = [replace(given[0], fields={**given[0].fields, "vdst": place}), *given[1:]]
        row = Lowering(arch, num_lanes_of(arch)).lower(changed).code[0]
        assert row[r.LANE_DEST] == (-1 if arch in RDNA and place == 124 else place)


@pytest.mark.parametrize("arch", TARGETS)
def test_one_lane_is_read_and_written(arch: str) -> None:
    wave = _wave(arch, _ACTIVE & ~0xFF)
    wave.sgpr[4] = 32 + 13
    before = wave.vgpr.copy()
    lines = ["v_readlane_b32 s8, v2, s4", "v_readlane_b32 s9, v3, 21"]
    lines += ["v_readfirstlane_b32 s10, v2", "v_writelane_b32 v1, s4, 13"]
    assert wave.run("\n".join(lines)) == r.ALL_ENDED
    lane = (32 + 13) % wave.num_lanes
    first = next(n for n in range(64) if _ACTIVE >> n & 1 and n >= 8)
    found = [int(value) for value in wave.sgpr[8:11]]
    assert found == [int(before[2, lane]), int(before[3, 21]), int(before[2, first])]
    before[1, 13] = 32 + 13
    np.testing.assert_array_equal(wave.vgpr, before)


@pytest.mark.parametrize("arch", TARGETS)
def test_with_no_active_lane_the_first_one_is_read(arch: str) -> None:
    wave = _wave(arch, 0)
    assert wave.run("v_readfirstlane_b32 s10, v2") == r.ALL_ENDED
    assert int(wave.sgpr[10]) == int(wave.vgpr[2, 0])


@pytest.mark.parametrize("inactive", ["kept", "zero", "read"])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("arch", RDNA)
def test_sixteen_lanes_change_places(arch: str, across: bool, inactive: str) -> None:
    wave = _wave(arch)
    wave.sgpr[4], wave.sgpr[5] = 0x3A9F_0C41, 0x7E28_B5D6
    wanted = wave.vgpr.copy()
    for lane in range(32):
        digit = f"{wave.sgpr[5]:08x}{wave.sgpr[4]:08x}"[::-1][lane % 16]
        source = (lane // 16 ^ across) * 16 + int(digit, 16)
        if not _ACTIVE >> lane & 1:
            continue
        if _ACTIVE >> source & 1 or inactive == "read":
            wanted[1, lane] = wave.vgpr[2, source]
        elif inactive == "zero":
            wanted[1, lane] = 0
    end = {"kept": "", "zero": " op_sel:[0,1]", "read": " op_sel:[1,0]"}[inactive]
    line = f"v_permlane{'x' if across else ''}16_b32 v1, v2, s4, s5{end}"
    assert wave.run(line) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)


@pytest.mark.parametrize("size", [16, 32])
def test_rows_of_two_registers_are_exchanged(size: int) -> None:
    wave = _wave("gfx950", _ALL)
    rows: Array = wave.vgpr[1:3].reshape(2, -1, size).copy()
    rows[0, 1::2], rows[1, ::2] = rows[1, ::2].copy(), rows[0, 1::2].copy()
    assert wave.run(f"v_permlane{size}_swap_b32 v1, v2") == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr[1:3], rows.reshape(2, 64))


@pytest.mark.parametrize("arch", RDNA)
@pytest.mark.parametrize(("high_c", "high_d"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_a_product_of_pairs_takes_and_leaves_halves(arch: str, high_c: int, high_d: int) -> None:
    wave = _wave(arch, _ALL)
    # 1.0078125 twice, whose square is cut to 1.015625; 3 times 2; 4 above, -8 below.
    wave.vgpr[2], wave.vgpr[3], wave.vgpr[4] = 0x4040_3F81, 0x4000_3F81, 0x4080_C100
    wave.vgpr[1] = 0xAAAA_BBBB
    bits = 0x4130 if high_c else 0xBF7B  # 11.015687... and -0.984313..., cut to eight bits
    wanted = bits << 16 | 0xBBBB if high_d else 0xAAAA_0000 | bits
    line = f"v_dot2_bf16_bf16 v1, v2, v3, v4 op_sel:[0,0,{high_c},{high_d}]"
    assert wave.run(line) == r.ALL_ENDED
    assert set(wave.vgpr[1, :32].tolist()) == {wanted}


@pytest.mark.parametrize("arch", TARGETS)
def test_two_registers_change_places_where_lanes_are_active(arch: str) -> None:
    wave = _wave(arch)
    wanted = wave.vgpr.copy()
    lanes = [n for n in range(wave.num_lanes) if _ACTIVE >> n & 1]
    wanted[1, lanes], wanted[2, lanes] = wave.vgpr[2, lanes], wave.vgpr[1, lanes]
    assert wave.run("v_swap_b32 v1, v2") == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)


def _by_number(arch: str, move: str, which: str) -> str:
    """A move of which M0, that is s4, chooses an operand: CDNA has a mode, RDNA names."""
    if arch in CDNA:
        return f"s_set_gpr_idx_on s4, gpr_idx({which})\nv_mov_b32 {move}\ns_set_gpr_idx_off"
    name = "v_movrels_b32" if which == "SRC0" else "v_movreld_b32"
    return f"s_mov_b32 m0, s4\n{name} {move}"


@pytest.mark.parametrize("arch", TARGETS)
def test_a_register_may_be_chosen_by_number(arch: str) -> None:
    lanes = [n for n in range(64 if arch in CDNA else 32) if _ACTIVE >> n & 1]
    for number in (0, 1, 3):
        for move, which in (("v1, v2", "SRC0"), ("v1, v2", "DST"), ("v1, s6", "DST")):
            wave = _wave(arch)
            wave.sgpr[4], wave.sgpr[6] = number, 0xABC
            source = wave.vgpr[2 + number if which == "SRC0" else 2, lanes]
            wanted = wave.vgpr.copy()
            dest = 1 if which == "SRC0" else 1 + number
            wanted[dest, lanes] = source if "s6" not in move else 0xABC
            assert wave.run(f"{_by_number(arch, move, which)}\nv_mov_b32 v5, v5") == r.ALL_ENDED
            np.testing.assert_array_equal(wave.vgpr, wanted)


def test_only_moves_may_stand_where_registers_are_chosen_by_number() -> None:
    lines = "s_set_gpr_idx_on s4, gpr_idx(SRC0)\n{}\ns_set_gpr_idx_off\nv_add_u32 v1, v2, v3"
    for line in ("v_add_u32 v1, v2, v3", "s_branch end\nend:"):
        (problem,) = Lowering("gfx942", 64).lower(assembled(lines.format(line), "gfx942")).problems
        assert problem == 1
