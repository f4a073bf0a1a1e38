"""The log of a wave's accesses: what each leaves in it, and where it has no room."""

from __future__ import annotations

import numpy as np
import pytest
from machine.amd_wave import Wave

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r

#: Lanes 0, 4 and 40.
_ACTIVE = 1 | 1 << 4 | 1 << 40
_LANES = [0, 4, 40]


def _wave(num_rows: int, active: int = _ACTIVE) -> Wave:
    wave = Wave("gfx942", active=active)
    wave.log = np.zeros((num_rows, 10), np.int64)
    wave.vgpr[10:14] = np.arange(4 * 64, dtype=np.uint32).reshape(4, 64) + 1000
    return wave


def _placed(wave: Wave, stride: int) -> tuple[Array, int]:
    """Memory of which lane n has `stride` bytes from n * stride on, by address in v2 and v3."""
    memory = np.arange(64 * stride, dtype=np.uint8)
    base = wave.memory.add(memory)
    wave.put(2, base + stride * np.arange(64, dtype=np.uint64))
    return memory, base


@pytest.mark.parametrize(("line", "num_bytes", "action"), [
    ("global_load_dword v10, v[2:3], off", 4, r.LOAD),
    ("global_load_dwordx3 v[10:12], v[2:3], off", 12, r.LOAD),
    ("global_store_dwordx4 v[2:3], v[10:13], off", 16, r.STORE),
    ("global_atomic_add v[2:3], v10, off", 4, r.ATOMIC),
])  # fmt: skip
def test_each_active_lane_leaves_a_row(line: str, num_bytes: int, action: int) -> None:
    wave = _wave(64)
    memory, base = _placed(wave, 16)
    assert wave.run(line) == r.ALL_ENDED
    assert wave.out[r.LOGGED] == len(_LANES)
    for row, lane in zip(wave.log, _LANES, strict=False):
        assert row[:8].tolist() == [0, lane, 0, base + 16 * lane, num_bytes, action, r.GLOBAL, 0]
        left = memory[16 * lane : 16 * lane + num_bytes].tobytes()
        wanted = [left[:8], left[8:]] if action != r.LOAD else [b"", b""]
        assert row[8:].tolist() == [int.from_bytes(part, "little", signed=len(part) == 8)
                                    for part in wanted]  # fmt: skip


def test_two_places_of_lds_leave_two_rows_a_lane() -> None:
    wave = _wave(128)
    wave.put(2, 8 * np.arange(64, dtype=np.uint32))
    assert wave.run("ds_read2_b32 v[10:11], v2 offset0:1 offset1:3") == r.ALL_ENDED
    assert wave.out[r.LOGGED] == 2 * len(_LANES)
    found = wave.log[: 2 * len(_LANES), [1, 3, 4, 6]].tolist()
    assert found == [[n, 8 * n + 4 * at, 4, -1] for at in (1, 3) for n in _LANES]


@pytest.mark.parametrize(("aperture", "space"), [(1 << 48, -1), (1 << 49, r.SCRATCH)])
def test_a_flat_address_is_told_as_the_memory_that_it_means(aperture: int, space: int) -> None:
    wave = _wave(64)
    wave.put(2, aperture + 4 * np.arange(64, dtype=np.uint64))
    assert wave.run("flat_store_dword v[2:3], v10") == r.ALL_ENDED
    assert wave.log[: len(_LANES), [1, 3, 6]].tolist() == [[n, 4 * n, space] for n in _LANES]


def test_a_scalar_load_is_one_of_lane_0() -> None:
    wave = _wave(1)
    memory = np.arange(64, dtype=np.uint8)
    base = wave.memory.add(memory)
    wave.sgpr[4], wave.sgpr[5] = base & 0xFFFFFFFF, base >> 32
    assert wave.run("s_load_dwordx2 s[8:9], s[4:5], 0x10") == r.ALL_ENDED
    assert wave.log[0].tolist() == [0, 0, 0, base + 16, 8, r.LOAD, r.GLOBAL, 0, 0, 0]
    assert (
        wave.run("s_load_dwordx2 s[8:9], s[4:5], 0x10\ns_load_dword s8, s[4:5], 0x0") == r.LOG_FULL
    )
    assert wave.out[r.LOGGED] == 1


@pytest.mark.parametrize(("line", "room"), [
    ("global_load_dword v10, v[2:3], off", 64), ("ds_read_b32 v10, v2", 128),
])  # fmt: skip
def test_where_a_wave_may_not_have_room_nothing_is_done(line: str, room: int) -> None:
    for num_rows, why in ((room, r.ALL_ENDED), (room - 1, r.LOG_FULL)):
        wave = _wave(num_rows)
        _placed(wave, 16)
        if line.startswith("ds"):
            wave.put(2, 8 * np.arange(64, dtype=np.uint32))
        before = wave.vgpr.copy()
        assert wave.run(line) == why
        assert np.array_equal(wave.vgpr, before) == (why == r.LOG_FULL)
        assert wave.out[r.LOGGED] == (len(_LANES) if why == r.ALL_ENDED else 0)


def test_lanes_that_are_not_active_or_outside_of_a_buffer_leave_no_row() -> None:
    """Though they were active, and inside, in the access before."""
    wave = _wave(192, active=-1)
    memory, base = _placed(wave, 4)
    wave.sgpr[4], wave.sgpr[5] = base & 0xFFFFFFFF, base >> 32
    wave.sgpr[6], wave.sgpr[7] = 4 * 20, 0x0002_7000
    wave.put(4, 4 * np.arange(64, dtype=np.uint32))
    lines = ["global_load_dword v10, v[2:3], off", f"s_mov_b32 exec_lo, {_ACTIVE & 0xFFFFFFFF:#x}"]
    lines += ["s_mov_b32 exec_hi, 0x100", "buffer_load_dword v10, v4, s[4:7], 0 offen"]
    assert wave.run("\n".join(lines)) == r.ALL_ENDED
    assert wave.out[r.LOGGED] == 64 + 2
    assert wave.log[64:66, 1].tolist() == _LANES[:2]
    assert len(memory) == 256
