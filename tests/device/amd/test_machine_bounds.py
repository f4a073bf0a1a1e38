"""Accesses at the ends of arrays, buffers, LDS and scratch, and straight from memory to LDS."""

from __future__ import annotations

import numpy as np
import pytest
from machine.amd_objects import TARGETS
from machine.amd_wave import Wave

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import access
from hypocenter.device.amd import instruction_rows as r

_ACTIVE = 0xF0F7_3355_9BCD_EF17
#: A lane that is active.
_LANE = 9
CDNA, RDNA = ("gfx942", "gfx950"), ("gfx1100", "gfx1201")
#: CDNA's and RDNA's word, bytes.
_WIDTHS = [("ubyte", "u8", 1), ("ushort", "u16", 2), ("dword", "b32", 4), ("dwordx2", "b64", 8),
           ("dwordx3", "b96", 12), ("dwordx4", "b128", 16)]  # fmt: skip
#: No scalar offset, as assemblers of RDNA4 want it.
_NO_OFFSET = {arch: "null" if arch == "gfx1201" else "0" for arch in TARGETS}
_STORED = {"ubyte": "byte", "ushort": "short", "u8": "b8", "u16": "b16"}


def _wave(arch: str, active: int = _ACTIVE) -> Wave:
    wave, rng = Wave(arch, active=active), np.random.default_rng(3)
    wave.vgpr[:] = rng.integers(0, 1 << 32, wave.vgpr.shape, np.uint32)
    wave.lds[:] = rng.integers(0, 256, wave.lds.shape, np.uint8)
    wave.scratch[:] = rng.integers(0, 256, wave.scratch.shape, np.uint8)
    return wave


def _is_active(lane: int) -> bool:
    return bool(_ACTIVE >> lane & 1)


def _line(arch: str, action: str, width: tuple[str, str, int], rest: str) -> str:
    """`buffer_load_...` or `global_store_...` with v10 and what follows as its data."""
    old, new, num_bytes = width
    name = old if arch in CDNA else new
    words = max(num_bytes // 4, 1)
    data = f"v[10:{9 + words}]" if words > 1 else "v10"
    if action.endswith("store"):
        name = _STORED.get(name, name)
    at, _, end = rest.partition("|")
    given = f"{at}, {data}" if action == "global_store" else f"{data}, {at}"
    return f"{action}_{name} {given}{end}"


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["load", "store", "add"])
@pytest.mark.parametrize("arch", TARGETS)
def test_one_lane_outside_stops_the_wave_before_anything_is_done(arch: str, action: str) -> None:
    for begin, is_outside in ((-1, True), (0, False), (60, False), (61, True), (1 << 20, True)):
        wave = _wave(arch)
        memory = np.arange(64, dtype=np.uint8)
        base = wave.memory.add(memory)
        wave.memory.add(np.zeros(64, np.uint8))
        wave.put(2, np.full(64, base, np.uint64))
        at = base + begin
        wave.vgpr[2, _LANE], wave.vgpr[3, _LANE] = at & 0xFFFFFFFF, at >> 32
        was, had = wave.vgpr.copy(), memory.copy()
        line = f"global_atomic_add{'' if arch in CDNA else '_u32'} v[2:3], v10, off"
        if action != "add":
            line = _line(arch, f"global_{action}", _WIDTHS[2], "v[2:3]|, off")
        why = wave.run(line)
        assert why == (r.BAD_ADDRESS if is_outside else r.ALL_ENDED), begin
        if is_outside:
            found = [int(wave.out[i]) for i in (r.LANE, r.AT, r.SIZE, r.WRITES)]
            assert found == [_LANE, at, 4, action != "load"]
            np.testing.assert_array_equal(wave.vgpr, was)
            np.testing.assert_array_equal(memory, had)


@pytest.mark.parametrize("arch", TARGETS)
def test_an_access_below_all_arrays_or_above_them_is_outside(arch: str) -> None:
    for at in (0, 4096, 1 << 45):
        wave = _wave(arch, 1)
        wave.memory.add(np.zeros(16, np.uint8))
        wave.put(2, np.full(64, at, np.uint64))
        assert wave.run(_line(arch, "global_load", _WIDTHS[2], "v[2:3]|, off")) == r.BAD_ADDRESS


@pytest.mark.parametrize("num_arrays", [1, 2, 3, 8])
def test_each_of_several_arrays_is_found_by_its_address(num_arrays: int) -> None:
    """Some begin where the one before ends; whoever looks between two others finds nothing."""
    wave = _wave("gfx942", (1 << 4 * num_arrays) - 1)
    memory = np.arange(16 * num_arrays, dtype=np.uint32)
    first = wave.memory._next
    places: list[int] = []
    for number in range(num_arrays):
        if number % 4:  # of four, three follow without a gap
            wave.memory._next = places[-1] + 64
        places.append(wave.memory.add(memory[16 * number : 16 * number + 16]))
    words = [places[lane // 4] + (0, 4, 56, 60)[lane % 4] for lane in range(4 * num_arrays)]
    wave.put(2, np.array(words, np.uint64))
    assert wave.run(_line("gfx942", "global_load", _WIDTHS[2], "v[2:3]|, off")) == r.ALL_ENDED
    wanted = [16 * (lane // 4) + (0, 1, 14, 15)[lane % 4] for lane in range(4 * num_arrays)]
    assert wave.vgpr[10, : 4 * num_arrays].tolist() == wanted
    for outside in (first - 4, places[min(num_arrays, 4) - 1] + 64, places[-1] + 64):
        wave = Wave("gfx942", active=1, memory=wave.memory)
        wave.put(2, np.array([outside], np.uint64))
        why = wave.run(_line("gfx942", "global_load", _WIDTHS[2], "v[2:3]|, off"))
        assert why == r.BAD_ADDRESS


@pytest.mark.parametrize("action", ["load", "store"])
def test_what_is_read_only_is_read_only(action: str) -> None:
    wave = _wave("gfx942", 1)
    memory = np.zeros(16, np.uint8)
    wave.put(2, np.full(64, wave.memory.add(memory, is_writable=False), np.uint64))
    why = wave.run(_line("gfx942", f"global_{action}", _WIDTHS[2], "v[2:3]|, off"))
    assert why == (r.ALL_ENDED if action == "load" else r.BAD_ADDRESS)
    assert not memory.any()


@pytest.mark.parametrize("states", [(2, 2), (2, access.FRESH), (access.UNMAPPED, 2), (2, 0)])
@pytest.mark.parametrize("begin", [-8, -4, -3, 0])
def test_each_page_of_an_access_must_be_there(begin: int, states: tuple[int, int]) -> None:
    """A page that nobody has touched stops the machine with a word of its own."""
    size = 1 << access.PAGE_BITS
    wave = _wave("gfx942", 1)
    memory = np.zeros(2 * size, np.uint8)
    base = wave.memory.add(memory)
    wave.pages = np.array(states, np.uint8)
    wave.put(2, np.full(64, base + size + begin, np.uint64))
    met = {states[(size + begin + byte) // size] for byte in range(4)}
    why = wave.run(_line("gfx942", "global_load", _WIDTHS[2], "v[2:3]|, off"))
    wanted = r.BAD_ADDRESS if access.UNMAPPED in met else r.ALL_ENDED
    assert why == (r.FRESH_PAGE if access.FRESH in met else wanted)


@pytest.mark.parametrize("arch", TARGETS)
def test_offsets_may_be_negative(arch: str) -> None:
    wave = _wave(arch, 1)
    memory = np.arange(64, dtype=np.uint8)
    wave.put(2, np.full(64, wave.memory.add(memory) + 40, np.uint64))
    assert wave.run(_line(arch, "global_load", _WIDTHS[2], "v[2:3]|, off offset:-8")) == r.ALL_ENDED
    assert wave.vgpr[10, 0] == memory[32:36].view(np.uint32)[0]


@pytest.mark.parametrize("arch", TARGETS)
def test_the_first_registers_are_addresses_too(arch: str) -> None:
    wave = _wave(arch)
    memory = np.arange(256, dtype=np.uint8)
    base = wave.memory.add(memory)
    wave.sgpr[0], wave.sgpr[1] = base & 0xFFFFFFFF, base >> 32
    wave.put(0, (np.arange(64) * 4).astype(np.uint32))
    lanes = list(filter(_is_active, range(wave.num_lanes)))
    line = _line(arch, "global_load", _WIDTHS[2], "v0|, s[0:1]")
    assert wave.run(line) == r.ALL_ENDED
    assert wave.vgpr[10, lanes].tolist() == memory.view(np.uint32)[lanes].tolist()


@pytest.mark.parametrize("how", ["register", "nothing", "both"])
@pytest.mark.parametrize("arch", TARGETS)
def test_scratch_is_addressed_by_a_scalar_too(arch: str, how: str) -> None:
    if how == "both" and arch == "gfx1201":
        how = "register"
    wave = _wave(arch)
    wave.sgpr[4], wave.sgpr[5] = 20, 1  # of a pair only the first is the offset
    wave.put(2, (np.arange(64) % 4 * 4).astype(np.uint32))
    at = {"register": "off|, s4 offset:8", "nothing": "off|, off offset:8",
          "both": "v2|, s4 offset:8"}[how]  # fmt: skip
    wanted = wave.vgpr.copy()
    for lane in filter(_is_active, range(wave.num_lanes)):
        begin = 8 + 20 * (how != "nothing") + (lane % 4 * 4 if how == "both" else 0)
        wanted[10, lane] = wave.scratch[lane, begin : begin + 4].copy().view(np.uint32)[0]
    assert wave.run(_line(arch, "scratch_load", _WIDTHS[2], at)) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)


@pytest.mark.parametrize("arch", TARGETS)
def test_scratch_ends_where_it_ends(arch: str) -> None:
    size = Wave(arch).scratch.shape[1]
    for at, is_outside in ((-4, True), (0, False), (size - 4, False), (size - 3, True)):
        wave = _wave(arch, 1 << _LANE)
        wave.put(2, np.full(64, at % (1 << 32), np.uint32))
        why = wave.run(_line(arch, "scratch_load", _WIDTHS[2], "v2|, off"))
        assert why == (r.BAD_ADDRESS if is_outside else r.ALL_ENDED), at
        if not is_outside:
            there = wave.scratch[_LANE, at : at + 4].copy().view(np.uint32)[0]
            assert wave.vgpr[10, _LANE] == there


@pytest.mark.parametrize("arch", TARGETS)
def test_flat_addresses_reach_memory_lds_and_scratch(arch: str) -> None:
    wave = _wave(arch)
    memory = np.arange(256, dtype=np.uint8)
    base = wave.memory.add(memory)
    bases = (base, access.SHARED_BASE, access.PRIVATE_BASE)
    lanes = np.arange(64)
    at = np.array([bases[lane % 3] + lane % 16 * 4 for lane in lanes], np.uint64)
    wave.put(2, at)
    wanted = wave.vgpr.copy()
    for lane in filter(_is_active, range(wave.num_lanes)):
        source: Array = (memory, wave.lds, wave.scratch[lane])[lane % 3]
        begin = lane % 16 * 4
        wanted[10, lane] = source[begin : begin + 4].copy().view(np.uint32)[0]
    assert wave.run(_line(arch, "flat_load", _WIDTHS[2], "v[2:3]|")) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)


@pytest.mark.parametrize("begin", [-4, -3, 0])
@pytest.mark.parametrize("space", ["lds", "scratch"])
@pytest.mark.parametrize("arch", TARGETS)
def test_a_flat_address_beyond_lds_or_scratch_is_a_fault(arch: str, space: str, begin: int) -> None:
    wave = _wave(arch, 1)
    first = access.SHARED_BASE if space == "lds" else access.PRIVATE_BASE
    held = wave.lds if space == "lds" else wave.scratch[0]
    wave.put(2, np.full(64, first + len(held) + begin, np.uint64))
    why = wave.run(_line(arch, "flat_load", _WIDTHS[2], "v[2:3]|"))
    assert why == (r.ALL_ENDED if begin == -4 else r.BAD_ADDRESS)


# -- buffers --------------------------------------------------------------------------------------


def _buffer(wave: Wave, num_records: int, stride: int = 0, checks: int = 0) -> Array:
    """Bytes behind s[4:7]; whoever reads beyond the end of a buffer meets other bytes."""
    memory = np.random.default_rng(5).integers(1, 256, 4096, np.uint8)
    base = wave.memory.add(memory)
    wave.sgpr[4], wave.sgpr[5] = base & 0xFFFFFFFF, base >> 32 | stride << 16
    wave.sgpr[6], wave.sgpr[7] = num_records, 0x0002_7000 | checks << 28
    wave.sgpr[8], wave.sgpr[9] = 8, 1  # the scalar offset, and what is none
    return memory


def _held(num_bytes: int, left: int) -> int:
    """How many of an access's bytes are inside where `left` are left: whole words of wide ones."""
    left = min(max(left, 0), num_bytes)
    return left if num_bytes < 4 and left == num_bytes else left // 4 * 4


def _check_buffer(wave: Wave, memory: Array, places: dict[int, tuple[int, int]], end: str) -> None:
    """Loads and stores of each width; each lane has its first byte and how many are left there."""
    for width in _WIDTHS:
        size, words = width[2], max(width[2] // 4, 1)
        wanted = wave.vgpr.copy()
        for lane, (begin, left) in places.items():
            raw = np.zeros(4 * words, np.uint8)
            held = _held(size, left)
            raw[:held] = memory[begin : begin + held]
            wanted[10 : 10 + words, lane] = raw.view(np.uint32)
        line = _line(wave.arch, "buffer_load", width, end)
        assert wave.run(line) == r.ALL_ENDED, line
        np.testing.assert_array_equal(wave.vgpr, wanted, line)
        rng = np.random.default_rng(size)
        wave.vgpr[10:14] = rng.integers(0, 1 << 32, (4, 64), np.uint32)
        there = memory.copy()
        for lane, (begin, left) in places.items():
            held = _held(size, left)
            there[begin : begin + held] = wave.vgpr[10:14, lane].copy().view(np.uint8)[:held]
        line = _line(wave.arch, "buffer_store", width, end)
        assert wave.run(line) == r.ALL_ENDED, line
        np.testing.assert_array_equal(memory, there, line)


@pytest.mark.parametrize("cut", [50, 51])
@pytest.mark.parametrize("stride", [0, 32])
@pytest.mark.parametrize("arch", TARGETS)
def test_a_buffer_ends_behind_its_bytes(arch: str, stride: int, cut: int) -> None:
    """The scalar offset is not part of the check, as LLVM's intrinsics have it. With a stride and
    no index CDNA counts bytes, and so does RDNA where the descriptor says that it is raw."""
    wave = _wave(arch)
    records = wave.num_lanes * 20 - cut
    memory = _buffer(wave, records, stride, 3 if arch in RDNA else 0)
    wave.put(2, (np.arange(64) * 20 + 2 * (np.arange(64) % 2 == 1)).astype(np.uint32))
    places = {}
    for lane in filter(_is_active, range(wave.num_lanes)):
        offset = int(wave.vgpr[2, lane]) + 4
        places[lane] = 8 + offset, records - offset
    _check_buffer(wave, memory, places, "v2|, s[4:7], s8 offen offset:4")


@pytest.mark.parametrize("arch", TARGETS)
def test_an_offset_below_zero_is_outside_of_a_buffer_as_triton_makes_it(arch: str) -> None:
    """It is 2 GiB or more without a sign; Triton says of its buffers that they end before."""
    wave = _wave(arch)
    memory = _buffer(wave, 0x7FFFFFFE, 0, 3 if arch in RDNA else 0)
    wave.put(2, np.where(np.arange(64) % 2 == 0, 64, (1 << 32) - 64).astype(np.uint32))
    lanes = filter(_is_active, range(wave.num_lanes))
    places = {lane: (64, 16) if lane % 2 == 0 else (0, 0) for lane in lanes}
    end = f"v2|, s[4:7], {_NO_OFFSET[arch]} offen"
    width = _WIDTHS[5]
    wanted = wave.vgpr.copy()
    for lane, (begin, left) in places.items():
        raw = memory[begin : begin + 16].view(np.uint32) if left else 0
        wanted[10:14, lane] = raw
    assert wave.run(_line(arch, "buffer_load", width, end)) == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)


@pytest.mark.parametrize("checks", [0, 1, 2])
@pytest.mark.parametrize("arch", TARGETS)
def test_a_buffer_of_structures_ends_behind_its_last_one(arch: str, checks: int) -> None:
    """RDNA's descriptor says whether the index and the offset in the structure are looked at."""
    wave = _wave(arch)
    records, stride = wave.num_lanes - 5, 20
    memory = _buffer(wave, records, stride, checks)
    lanes = np.arange(64)
    wave.put(2, np.stack([lanes, lanes % 6 * 4], -1).astype(np.uint32))
    places = {}
    for lane in filter(_is_active, range(wave.num_lanes)):
        offset = lane % 6 * 4
        left = stride - offset if arch in CDNA or checks == 0 else 99
        is_in = lane < records or (arch in RDNA and checks == 2)
        places[lane] = lane * stride + offset, left if is_in else 0
    _check_buffer(wave, memory, places, f"v[2:3]|, s[4:7], {_NO_OFFSET[arch]} idxen offen")


@pytest.mark.parametrize("arch", RDNA)
def test_of_a_raw_buffer_the_index_counts_in_bytes(arch: str) -> None:
    wave = _wave(arch)
    stride, records = 20, wave.num_lanes * 20 - 70
    memory = _buffer(wave, records, stride, 3)
    lanes = np.arange(64)
    wave.put(2, np.stack([lanes, lanes % 6 * 4], -1).astype(np.uint32))
    places = {}
    for lane in filter(_is_active, range(wave.num_lanes)):
        begin = lane * stride + lane % 6 * 4
        places[lane] = begin, records - begin
    _check_buffer(wave, memory, places, f"v[2:3]|, s[4:7], {_NO_OFFSET[arch]} idxen offen")


@pytest.mark.parametrize("arch", TARGETS)
def test_an_access_leaves_nothing_for_the_next_one(arch: str) -> None:
    """Behind one that is inside of a buffer another one is outside, and the other way round."""
    wave = _wave(arch, (1 << 8) - 1)
    memory = _buffer(wave, 32, 0, 3)
    base = int(wave.sgpr[4] | (wave.sgpr[5] & 0xFFFF) << 32)
    wave.put(2, np.arange(8, dtype=np.uint32) * 4)
    wave.put(3, np.arange(8, dtype=np.uint32) * 4 + 32)
    wave.put(4, base + np.arange(8, dtype=np.uint64) * 4)
    wave.vgpr[10:14] = 7
    buffer, none = "|, s[4:7]", _NO_OFFSET[arch]
    lines = [
        _line(arch, "buffer_load", _WIDTHS[0], f"v2{buffer}, {none} offen"),
        _line(arch, "buffer_load", _WIDTHS[0], f"v3{buffer}, {none} offen"),
        _line(arch, "buffer_load", _WIDTHS[2], f"v3{buffer}, {none} offen").replace("v10", "v12"),
        _line(arch, "global_load", _WIDTHS[2], "v[4:5]|, off").replace("v10", "v11"),
    ]
    assert wave.run("\n".join(lines)) == r.ALL_ENDED
    assert wave.vgpr[10, :8].tolist() == [0] * 8
    assert wave.vgpr[11, :8].tolist() == memory[:32].view(np.uint32).tolist()


@pytest.mark.parametrize("arch", RDNA)
def test_a_buffer_of_no_records_is_empty_however_it_is_checked(arch: str) -> None:
    for checks in (0, 1, 2, 3):
        wave = _wave(arch)
        memory = _buffer(wave, 0, 16, checks)
        wave.put(2, np.zeros(64, np.uint32))
        lanes = filter(_is_active, range(wave.num_lanes))
        end = f"v2|, s[4:7], {_NO_OFFSET[arch]} offen"
        _check_buffer(wave, memory, dict.fromkeys(lanes, (0, 0)), end)


@pytest.mark.parametrize("arch", TARGETS)
def test_a_buffer_that_is_larger_than_its_array_does_not_hide_a_fault(arch: str) -> None:
    wave = _wave(arch, 1 << _LANE)
    memory = _buffer(wave, 1 << 20, 0, 3)
    wave.put(2, np.full(64, len(memory), np.uint32))
    end = f"v2|, s[4:7], {_NO_OFFSET[arch]} offen"
    why = wave.run(_line(arch, "buffer_load", _WIDTHS[2], end))
    assert (why, int(wave.out[r.LANE])) == (r.BAD_ADDRESS, _LANE)


@pytest.mark.parametrize("stride", [0, 4])
@pytest.mark.parametrize("arch", TARGETS)
def test_scalar_loads_of_a_buffer_end_with_it(arch: str, stride: int) -> None:
    wave = _wave(arch)
    memory = _buffer(wave, 20 if stride == 0 else 5, stride)
    wave.sgpr[16:20] = 7
    kind = "dwordx4" if arch in CDNA else "b128"
    assert wave.run(f"s_buffer_load_{kind} s[16:19], s[4:7], 0x8") == r.ALL_ENDED
    np.testing.assert_array_equal(wave.sgpr[16:20], [*memory[8:20].view(np.uint32), 0])


@pytest.mark.parametrize(("name", "size", "is_signed"), [
    ("i8", 1, True), ("u8", 1, False), ("i16", 2, True), ("u16", 2, False), ("b96", 12, False),
])  # fmt: skip
def test_scalar_loads_of_rdna4_have_more_widths(name: str, size: int, is_signed: bool) -> None:
    wave = _wave("gfx1201")
    memory = _buffer(wave, 4096)
    memory[:32] = np.arange(32) + 200
    wave.sgpr[5] &= 0xFFFF
    last = f"s[16:{15 + size // 4}]" if size > 4 else "s16"
    place = 7 if size == 1 else 6
    assert wave.run(f"s_load_{name} {last}, s[4:5], {place}") == r.ALL_ENDED
    first = 4 if size > 4 else place
    raw = memory[first : first + size].tobytes()
    if size < 4:
        value = int.from_bytes(raw, "little", signed=is_signed) & 0xFFFFFFFF
        assert int(wave.sgpr[16]) == value
    else:
        np.testing.assert_array_equal(wave.sgpr[16:19], np.frombuffer(raw, np.uint32))


@pytest.mark.parametrize("arch", TARGETS)
def test_a_scalar_load_outside_of_all_arrays_is_a_fault(arch: str) -> None:
    wave = _wave(arch)
    base = wave.memory.add(np.zeros(8, np.uint8))
    wave.sgpr[4], wave.sgpr[5] = base & 0xFFFFFFFF, base >> 32
    kind = "dwordx2" if arch in CDNA else "b64"
    assert wave.run(f"s_load_{kind} s[16:17], s[4:5], 0x0") == r.ALL_ENDED
    assert wave.run(f"s_load_{kind} s[16:17], s[4:5], 0x4") == r.BAD_ADDRESS
    told = [int(wave.out[each]) for each in (r.LANE, r.AT, r.SIZE, r.WRITES)]
    assert told == [0, base + 8, 8, 0]


@pytest.mark.parametrize("arch", TARGETS)
def test_a_scalar_load_reads_what_is_read_only_and_goes_back_from_its_base(arch: str) -> None:
    wave = _wave(arch)
    memory = np.arange(16, dtype=np.uint32)
    base = wave.memory.add(memory, is_writable=False) + 32
    wave.sgpr[4], wave.sgpr[5] = base & 0xFFFFFFFF, base >> 32
    kind = "dword" if arch in CDNA else "b32"
    assert wave.run(f"s_load_{kind} s16, s[4:5], -0x8") == r.ALL_ENDED
    assert wave.sgpr[16] == 6


# -- LDS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["read", "write"])
@pytest.mark.parametrize("arch", TARGETS)
def test_lds_ends_where_it_ends(arch: str, action: str) -> None:
    """Loads give zero there and stores are dropped; the machine says where it was first."""
    wave = _wave(arch)
    size = len(wave.lds)
    at = np.full(64, size - 4, np.uint32)
    at[_LANE:] = size - 3
    wave.put(2, at)
    wanted, there = wave.vgpr.copy(), wave.lds.copy()
    for lane in filter(_is_active, range(wave.num_lanes)):
        if action == "write" and lane < _LANE:
            there[-4:] = wave.vgpr[10, lane : lane + 1].copy().view(np.uint8)
        elif action == "read":
            wanted[10, lane] = there[-4:].view(np.uint32)[0] if lane < _LANE else 0
    verb = action if arch in CDNA else {"read": "load", "write": "store"}[action]
    line = f"ds_{verb}_b32 v10, v2" if action == "read" else f"ds_{verb}_b32 v2, v10"
    assert wave.run(f"s_nop 0\n{line}") == r.ALL_ENDED
    np.testing.assert_array_equal(wave.vgpr, wanted)
    np.testing.assert_array_equal(wave.lds, there)
    found = int(wave.out[r.LOCAL_OUTSIDE_ROW]), int(wave.out[r.LOCAL_OUTSIDE_AT])
    assert found == (1, size - 3)


@pytest.mark.parametrize("lane", [0, 1, 63])
def test_lds_that_only_an_inactive_lane_would_leave_is_not_left(lane: int) -> None:
    wave = _wave("gfx942", 1 << lane)
    wave.put(2, np.where(np.arange(64) == lane, 0, 1 << 20).astype(np.uint32))
    assert wave.run("ds_read_b32 v10, v2") == r.ALL_ENDED
    assert wave.out[r.LOCAL_OUTSIDE_ROW] == -1


def test_the_first_access_outside_of_lds_is_kept() -> None:
    wave = _wave("gfx942", 1)
    wave.put(2, np.array([1 << 20], np.uint32))
    assert wave.run("ds_read_b32 v10, v2\nds_read_b32 v11, v2 offset:8") == r.ALL_ENDED
    found = int(wave.out[r.LOCAL_OUTSIDE_ROW]), int(wave.out[r.LOCAL_OUTSIDE_AT])
    assert found == (0, 1 << 20)


@pytest.mark.parametrize("arch", TARGETS)
def test_offsets_of_lds_have_two_bytes(arch: str) -> None:
    wave = _wave(arch, 1)
    wave.put(2, np.array([4], np.uint32))
    name = "ds_read_b32" if arch in CDNA else "ds_load_b32"
    for offset in (8, 0x1F8, 0x304, 0xFF8):
        assert wave.run(f"{name} v10, v2 offset:{offset}") == r.ALL_ENDED
        there = wave.lds[4 + offset : 8 + offset]
        assert wave.vgpr[10, 0] == (there.view(np.uint32)[0] if len(there) else 0), offset


@pytest.mark.parametrize(("line", "columns"), [
    ("ds_read_b32 a10, v2", {r.RESULT: 266}),
    ("ds_write_b32 v2, a10", {r.DATA: 266}),
    ("ds_write2_b32 v2, a10, a20", {r.DATA: 266, r.SECOND_DATA: 276}),
    ("ds_read_b32 v10, v2", {r.RESULT: 10}),
    ("global_load_dword a10, v[2:3], off", {r.RESULT: 266}),
    ("global_store_dword v[2:3], a10, off", {r.DATA: 266}),
    ("global_store_dword v[2:3], v10, off", {r.DATA: 10}),
])  # fmt: skip
def test_accumulators_are_the_registers_from_256_on(line: str, columns: dict[int, int]) -> None:
    row = Wave("gfx942").machine(line).code[0]
    assert {column: int(row[column]) for column in columns} == columns


_NARROW = [("ubyte", 1, False), ("sbyte", 1, True), ("ushort", 2, False), ("sshort", 2, True)]
_TO_LDS = [*_NARROW, ("dword", 4, False), ("dwordx3", 12, False), ("dwordx4", 16, False)]


@pytest.mark.parametrize("space", ["global", "buffer"])
@pytest.mark.parametrize("arch", CDNA)
def test_words_go_straight_to_lds(arch: str, space: str) -> None:
    """Lane by lane from M0 and the offset on; what is narrower than a word fills a word."""
    for name, size, is_signed in _TO_LDS:
        if size > 4 and arch != "gfx950":
            continue
        wave = _wave(arch)
        records = wave.num_lanes * 20 - 46  # of wide ones a part is outside
        memory = _buffer(wave, records)
        base = int(wave.sgpr[4] | (wave.sgpr[5] & 0xFFFF) << 32)
        wave.sgpr[124] = 256
        wave.put(2, (np.arange(64) * 20 + (base if space == "global" else 0)).astype(np.uint64))
        there = wave.lds.copy()
        for lane in filter(_is_active, range(64)):
            begin = lane * 20 + 4
            left = records - begin if space == "buffer" else 99
            held, raw = _held(size, left), bytearray(max(size, 4))
            raw[:held] = memory[begin : begin + held].tobytes()
            if size < 4 and held:
                value = int.from_bytes(raw[:size], "little", signed=is_signed)
                raw[:] = (value % (1 << 32)).to_bytes(4, "little")
            at = 256 + 4 + lane * max(size, 4)
            there[at : at + len(raw)] = list(raw)
        line = f"global_load_lds_{name} v[2:3], off offset:4"
        if space == "buffer":
            line = f"buffer_load_{name} v2, s[4:7], 0 offen offset:4 lds"
        registers = wave.vgpr.copy()
        assert wave.run(line) == r.ALL_ENDED, line
        np.testing.assert_array_equal(wave.lds, there, line)
        np.testing.assert_array_equal(wave.vgpr, registers, line)


def test_words_that_go_straight_to_lds_stop_at_its_end() -> None:
    wave = _wave("gfx942", _ACTIVE)
    _buffer(wave, 4096)
    wave.sgpr[124] = len(wave.lds) - 8
    there = wave.lds.copy()
    wave.put(2, np.zeros(64, np.uint32))
    memory = _buffer(wave, 4096)
    assert wave.run("buffer_load_dword v2, s[4:7], 0 offen lds") == r.ALL_ENDED
    np.testing.assert_array_equal(wave.lds[:-8], there[:-8])
    np.testing.assert_array_equal(wave.lds[-8:], np.tile(memory[:4], 2))


def test_wide_words_that_go_straight_to_lds_stop_at_its_end() -> None:
    """What of a lane's four words has no room is dropped; memory may end behind them, too."""
    wave = _wave("gfx950", 1)
    memory = np.arange(16, dtype=np.uint8)
    base = wave.memory.add(memory)
    wave.sgpr[124] = len(wave.lds) - 8
    wave.put(2, np.array([base], np.uint64))
    there = wave.lds.copy()
    there[-8:] = memory[:8]
    assert wave.run("global_load_lds_dwordx4 v[2:3], off") == r.ALL_ENDED
    np.testing.assert_array_equal(wave.lds, there)


@pytest.mark.parametrize("bits", [8, 16])
def test_what_sixteen_lanes_read_is_turned(bits: int) -> None:
    """They read rows of sixteen numbers, and each lane gets a column."""
    wave = _wave("gfx950", (1 << 64) - 1)
    wave.put(2, (np.arange(64) * 8 + 32).astype(np.uint32))
    numbers = wave.lds[32 : 32 + 64 * 8].view(f"u{bits // 8}").reshape(4, -1, 16)
    assert wave.run(f"ds_read_b64_tr_b{bits} v[10:11], v2") == r.ALL_ENDED
    found = wave.get(10, f"u{bits // 8}", 2).reshape(4, 16, -1)
    np.testing.assert_array_equal(found, numbers.transpose(0, 2, 1))


# -- atomics of halves and of wide numbers -------------------------------------------------------


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("space", ["global", "ds"])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1201"])
def test_two_halves_are_added_at_once(arch: str, space: str, kind: str) -> None:
    wave = _wave(arch)
    rng = np.random.default_rng(6)
    sums = rng.integers(-8, 8, (2, 64, 2)) / 4  # every sum is exact in both types
    wide = sums.astype(np.float32).view(np.uint32) >> 16
    halves = sums.astype(np.float16).view(np.uint16) if kind == "f16" else wide.astype(np.uint16)
    added = (sums[0] + sums[1]).astype(np.float32)
    made = added.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        made = (added.view(np.uint32) >> 16).astype(np.uint16)
    memory = halves[0].copy().reshape(-1)
    base = wave.memory.add(memory)
    wave.put(10, halves[1])
    wanted = memory.reshape(64, 2).copy()
    for lane in filter(_is_active, range(wave.num_lanes)):
        wanted[lane] = made[lane]
    if space == "ds":
        wave.lds[:256] = memory.view(np.uint8)
        wave.put(2, (np.arange(64) * 4).astype(np.uint32))
        assert wave.run(f"ds_pk_add_{kind} v2, v10") == r.ALL_ENDED
        found = wave.lds[:256].view(np.uint16)
    else:
        wave.put(2, (base + np.arange(64) * 4).astype(np.uint64))
        assert wave.run(f"global_atomic_pk_add_{kind} v[2:3], v10, off") == r.ALL_ENDED
        found = memory
    np.testing.assert_array_equal(found.reshape(64, 2), wanted)


@pytest.mark.parametrize(
    ("name", "step"), [("add", np.add), ("min", np.minimum), ("max", np.maximum)]
)
@pytest.mark.parametrize("arch", CDNA)
def test_atomics_of_wide_numbers(arch: str, name: str, step: np.ufunc) -> None:
    wave = _wave(arch)
    rng = np.random.default_rng(7)
    memory, given = rng.standard_normal((2, 64))
    wanted = memory.copy()
    base = wave.memory.add(memory)
    wave.put(2, (base + np.arange(64) * 8).astype(np.uint64))
    wave.put(10, given)
    for lane in filter(_is_active, range(64)):
        wanted[lane] = step(memory[lane], given[lane])
    assert wave.run(f"global_atomic_{name}_f64 v[2:3], v[10:11], off") == r.ALL_ENDED
    np.testing.assert_array_equal(memory, wanted)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("arch", TARGETS)
def test_lds_subtracts_the_other_way_too(arch: str, bits: int) -> None:
    wave, size = _wave(arch), bits // 8
    wave.put(2, (np.arange(64) * size).astype(np.uint32))
    numbers, given = wave.lds[: 64 * size].view(f"u{size}"), wave.vgpr[10 : 10 + size // 4]
    wanted = numbers.copy()
    for lane in filter(_is_active, range(wave.num_lanes)):
        own = int(given[:, lane].copy().view(f"u{size}")[0])
        wanted[lane] = (own - int(numbers[lane])) % (1 << bits)
    data = "v10" if bits == 32 else "v[10:11]"
    assert wave.run(f"ds_rsub_u{bits} v2, {data}") == r.ALL_ENDED
    np.testing.assert_array_equal(numbers, wanted)
