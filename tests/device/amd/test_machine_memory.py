"""Loads, stores and atomics of each width in each space, beside bytes that numpy moves."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from machine.amd_objects import TARGETS
from machine.amd_wave import Wave

from hypocenter.device.amd import instruction_rows as r

#: CDNA's name, RDNA's name, bytes, whether the sign is spread, which half is written.
_LOADS = [
    ("ubyte", "u8", 1, False, ""),
    ("sbyte", "i8", 1, True, ""),
    ("ushort", "u16", 2, False, ""),
    ("sshort", "i16", 2, True, ""),
    ("dword", "b32", 4, False, ""),
    ("dwordx2", "b64", 8, False, ""),
    ("dwordx3", "b96", 12, False, ""),
    ("dwordx4", "b128", 16, False, ""),
    ("ubyte_d16", "d16_u8", 1, False, "low"),
    ("sbyte_d16", "d16_i8", 1, True, "low"),
    ("short_d16", "d16_b16", 2, False, "low"),
    ("ubyte_d16_hi", "d16_hi_u8", 1, False, "high"),
    ("sbyte_d16_hi", "d16_hi_i8", 1, True, "high"),
    ("short_d16_hi", "d16_hi_b16", 2, False, "high"),
]
_STORES = [
    ("byte", "b8", 1, ""),
    ("short", "b16", 2, ""),
    ("dword", "b32", 4, ""),
    ("dwordx2", "b64", 8, ""),
    ("dwordx3", "b96", 12, ""),
    ("dwordx4", "b128", 16, ""),
    ("byte_d16_hi", "d16_hi_b8", 1, "high"),
    ("short_d16_hi", "d16_hi_b16", 2, "high"),
]
#: LDS says the same of CDNA by other words.
_LOCAL = {
    "ubyte": "u8", "sbyte": "i8", "ushort": "u16", "sshort": "i16", "dword": "b32",
    "dwordx2": "b64", "dwordx3": "b96", "dwordx4": "b128", "ubyte_d16": "u8_d16",
    "sbyte_d16": "i8_d16", "short_d16": "u16_d16", "ubyte_d16_hi": "u8_d16_hi",
    "sbyte_d16_hi": "i8_d16_hi", "short_d16_hi": "u16_d16_hi", "byte": "b8", "short": "b16",
    "byte_d16_hi": "b8_d16_hi",
}  # fmt: skip
SPACES = ("global", "saddr", "flat", "buffer", "scratch", "ds")
#: Lanes that are active, so that the others show whether they are left alone.
_ACTIVE = 0xF0F7_3355_9BCD_EF17
_AT, _DATA = 2, 10
_STEP, _SHIFT = 24, 8


class _Place:
    """Bytes [lanes' own 32 of scratch, or 2048 of all], where each lane's access is, its text."""

    def __init__(self, space: str, arch: str) -> None:
        self.wave, self.space, self.arch = Wave(arch, active=_ACTIVE), space, arch
        rng = np.random.default_rng(11)
        lanes = self.wave.num_lanes
        self.offsets = np.arange(lanes) * _STEP + _SHIFT
        self.bytes = rng.integers(0, 256, 2048, np.uint8)
        wave = self.wave
        wave.vgpr[:] = rng.integers(0, 1 << 32, wave.vgpr.shape, np.uint32)
        if space == "scratch":
            wave.scratch[:] = rng.integers(0, 256, wave.scratch.shape, np.uint8)
            self.offsets = np.arange(lanes) * wave.scratch.shape[1] + _SHIFT + 16
            self.bytes = wave.scratch.reshape(-1)
            wave.put(_AT, np.full(lanes, 16, np.uint32))
        elif space == "ds":
            wave.lds[:2048] = self.bytes
            self.bytes = wave.lds
            wave.put(_AT, (self.offsets - _SHIFT).astype(np.uint32))
        else:
            base = wave.memory.add(self.bytes)
            wave.put(_AT, (base + self.offsets - _SHIFT * (space != "flat")).astype(np.uint64))
            if space in ("saddr", "buffer"):
                wave.put(_AT, (self.offsets - _SHIFT).astype(np.uint32))
            wave.sgpr[4], wave.sgpr[5] = base & 0xFFFFFFFF, base >> 32
            wave.sgpr[6], wave.sgpr[7], wave.sgpr[8] = 2048, 0x0002_7000, 4

    def line(self, action: str, old: str, new: str, num_bytes: int) -> str:
        """The instruction, for registers from _DATA on."""
        is_cdna = self.arch.startswith("gfx9")
        words = max(num_bytes // 4, 1)
        data = f"v[{_DATA}:{_DATA + words - 1}]" if words > 1 else f"v{_DATA}"
        if self.space == "ds":
            verb = {"load": "read", "store": "write"}[action] if is_cdna else action
            kind = _LOCAL[old] if action == "load" else _LOCAL[old].replace("u16", "b16")
            given = [data, f"v{_AT}"] if action == "load" else [f"v{_AT}", data]
            return f"ds_{verb}_{kind} {', '.join(given)} offset:{_SHIFT}"
        name = f"{action}_{old if is_cdna else new}"
        pair = f"v[{_AT}:{_AT + 1}]"
        if self.space == "buffer":
            return f"buffer_{name} {data}, v{_AT}, s[4:7], s8 offen offset:4"
        at, rest = {
            "global": (pair, f", off offset:{_SHIFT}"),
            "saddr": (f"v{_AT}", f", s[4:5] offset:{_SHIFT}"),
            "flat": (pair, ""),
            "scratch": (f"v{_AT}", f", off offset:{_SHIFT}"),
        }[self.space]
        space = "global" if self.space == "saddr" else self.space
        given = [data, at] if action == "load" else [at, data]
        return f"{space}_{name} {', '.join(given)}{rest}"

    def lanes(self) -> list[tuple[int, int]]:
        """Each active lane with the byte at which its access begins."""
        return [
            (lane, int(offset)) for lane, offset in enumerate(self.offsets) if _ACTIVE >> lane & 1
        ]


def _loaded(raw: bytes, old: int, is_signed: bool, half: str) -> list[int]:
    """The words that a load leaves in registers, the first of which was `old`."""
    if len(raw) >= 4:
        return list(np.frombuffer(raw, np.uint32))
    value = int.from_bytes(raw, "little", signed=is_signed)
    if half == "low":
        return [old & 0xFFFF0000 | value & 0xFFFF]
    if half == "high":
        return [old & 0xFFFF | (value & 0xFFFF) << 16]
    return [value & 0xFFFFFFFF]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("arch", TARGETS)
def test_loads_of_each_width(arch: str, space: str) -> None:
    for old, new, num_bytes, is_signed, half in _LOADS:
        place = _Place(space, arch)
        wanted = place.wave.vgpr.copy()
        for lane, at in place.lanes():
            raw = place.bytes[at : at + num_bytes].tobytes()
            words = _loaded(raw, int(wanted[_DATA, lane]), is_signed, half)
            wanted[_DATA : _DATA + len(words), lane] = words
        line = place.line("load", old, new, num_bytes)
        assert place.wave.run(line) == r.ALL_ENDED, line
        np.testing.assert_array_equal(place.wave.vgpr, wanted, line)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("arch", TARGETS)
def test_stores_of_each_width(arch: str, space: str) -> None:
    for old, new, num_bytes, half in _STORES:
        place = _Place(space, arch)
        wanted = place.bytes.copy()
        for lane, at in place.lanes():
            raw = place.wave.vgpr[_DATA : _DATA + 4, lane].tobytes()[2 * (half == "high") :]
            wanted[at : at + num_bytes] = list(raw[:num_bytes])
        line = place.line("store", old, new, num_bytes)
        assert place.wave.run(line) == r.ALL_ENDED, line
        np.testing.assert_array_equal(place.bytes, wanted, line)


#: CDNA's and RDNA's name in memory, LDS's, what is made of what was there and what is given.
_ATOMICS: list[tuple[str, str, str, str, Callable[[int, int], Any]]] = [
    ("add", "add_u32", "add_u32", "u4", lambda a, b: a + b),
    ("sub", "sub_u32", "sub_u32", "u4", lambda a, b: a - b),
    ("smin", "min_i32", "min_i32", "i4", min),
    ("smax", "max_i32", "max_i32", "i4", max),
    ("umin", "min_u32", "min_u32", "u4", min),
    ("umax", "max_u32", "max_u32", "u4", max),
    ("and", "and_b32", "and_b32", "u4", lambda a, b: a & b),
    ("or", "or_b32", "or_b32", "u4", lambda a, b: a | b),
    ("xor", "xor_b32", "xor_b32", "u4", lambda a, b: a ^ b),
    ("inc", "inc_u32", "inc_u32", "u4", lambda a, b: 0 if a >= b else a + 1),
    ("dec", "dec_u32", "dec_u32", "u4", lambda a, b: b if a == 0 or a > b else a - 1),
    ("swap", "swap_b32", "wrxchg_rtn_b32", "u4", lambda a, b: b),
    ("add_f32", "add_f32", "add_f32", "f4", lambda a, b: a + b),
    ("add_x2", "add_u64", "add_u64", "u8", lambda a, b: a + b),
    ("sub_x2", "sub_u64", "sub_u64", "u8", lambda a, b: a - b),
    ("smin_x2", "min_i64", "min_i64", "i8", min),
    ("smax_x2", "max_i64", "max_i64", "i8", max),
    ("umin_x2", "min_u64", "min_u64", "u8", min),
    ("umax_x2", "max_u64", "max_u64", "u8", max),
    ("and_x2", "and_b64", "and_b64", "u8", lambda a, b: a & b),
    ("or_x2", "or_b64", "or_b64", "u8", lambda a, b: a | b),
    ("xor_x2", "xor_b64", "xor_b64", "u8", lambda a, b: a ^ b),
    ("inc_x2", "inc_u64", "inc_u64", "u8", lambda a, b: 0 if a >= b else a + 1),
    ("dec_x2", "dec_u64", "dec_u64", "u8", lambda a, b: b if a == 0 or a > b else a - 1),
    ("swap_x2", "swap_b64", "wrxchg_rtn_b64", "u8", lambda a, b: b),
]


def _atomic_line(place: _Place, row: tuple[Any, ...], *, returns: bool) -> str:
    """Its result, where it has one, goes to registers from 20 on."""
    old, new, local, dtype, _ = row
    is_cdna, size = place.arch.startswith("gfx9"), np.dtype(dtype).itemsize
    data = f"v[{_DATA}:{_DATA + 1}]" if size == 8 else f"v{_DATA}"
    dest = ("v[20:21], " if size == 8 else "v20, ") if returns else ""
    if place.space == "ds":
        name = local if not returns or "rtn" in local else re.sub(r"_(?=[uibf]\d)", "_rtn_", local)
        if not is_cdna:
            name = name.replace("wrxchg", "storexchg")
        return f"ds_{name} {dest}v{_AT}, {data} offset:{_SHIFT}"
    flag = {"gfx1100": " glc", "gfx1201": " th:TH_ATOMIC_RETURN"}.get(place.arch, " sc0")
    name = f"{'global' if place.space != 'flat' else 'flat'}_atomic_{old if is_cdna else new}"
    rest = f", off offset:{_SHIFT}" if place.space == "global" else ""
    return f"{name} {dest}v[{_AT}:{_AT + 1}], {data}{rest}{flag if returns else ''}"


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("space", ["global", "flat", "ds"])
@pytest.mark.parametrize("arch", TARGETS)
def test_atomics_one_lane_after_the_other(arch: str, space: str, returns: bool) -> None:
    for row in _ATOMICS:
        if space == "ds" and not returns and row[0].startswith("swap"):
            continue  # without a result it is a store
        place, dtype, step = _Place(space, arch), np.dtype(row[3]), row[4]
        wave = place.wave
        # Every third lane works where the one before it does.
        shared = np.arange(wave.num_lanes) - (np.arange(wave.num_lanes) % 3 == 1)
        low = wave.vgpr[_AT : _AT + 2, shared].copy()
        wave.vgpr[_AT : _AT + 2, : wave.num_lanes] = low
        if dtype.kind == "f":
            place.bytes[:2048].view("f4")[:] = np.arange(512) / 4
            wave.put(_DATA, np.linspace(-3, 9, wave.num_lanes).astype("f4"))
        wanted, registers = place.bytes.copy(), wave.vgpr.copy()
        for lane, _ in place.lanes():
            at = int(place.offsets[shared[lane]])
            there = wanted[at : at + dtype.itemsize].view(dtype)
            given = wave.vgpr[_DATA : _DATA + 2, lane].copy().view(np.uint8)
            was, operand = there.copy(), given[: dtype.itemsize].view(dtype)[0]
            if dtype.kind == "f":
                there[0] = step(was[0], operand)
            else:
                made = step(int(was[0]), int(operand)) % (1 << 8 * dtype.itemsize)
                there[:] = np.array([made], f"u{dtype.itemsize}").view(dtype)
            if returns:
                words = was.view(np.uint32)
                registers[20 : 20 + len(words), lane] = words
        line = _atomic_line(place, row, returns=returns)
        assert wave.run(line) == r.ALL_ENDED, line
        np.testing.assert_array_equal(place.bytes, wanted, line)
        np.testing.assert_array_equal(wave.vgpr, registers, line)


@pytest.mark.parametrize("is_equal", [False, True])
@pytest.mark.parametrize("num_words", [1, 2])
@pytest.mark.parametrize("space", ["global", "ds"])
@pytest.mark.parametrize("arch", TARGETS)
def test_compare_and_swap(arch: str, space: str, num_words: int, is_equal: bool) -> None:
    place, is_cdna = _Place(space, arch), arch.startswith("gfx9")
    wave, size = place.wave, 4 * num_words
    new, old = 10, 10 + num_words  # in memory the new value comes first
    if space == "ds" and is_cdna:
        new, old = old, new
    wanted, registers = place.bytes.copy(), wave.vgpr.copy()
    for lane, at in place.lanes():
        was = place.bytes[at : at + size].copy().view(np.uint32)
        if is_equal:
            wave.vgpr[old : old + num_words, lane] = was
            registers[old : old + num_words, lane] = was
            wanted[at : at + size] = wave.vgpr[new : new + num_words, lane].copy().view(np.uint8)
        registers[20 : 20 + num_words, lane] = was
    first, second, dest = (
        f"v[{n}:{n + num_words - 1}]" if num_words > 1 else f"v{n}"
        for n in (10, 10 + num_words, 20)
    )
    if space == "ds":
        name = "cmpst_rtn" if is_cdna else "cmpstore_rtn"
        line = f"ds_{name}_b{8 * size} {dest}, v{_AT}, {first}, {second} offset:{_SHIFT}"
    else:
        name = ("cmpswap" + "_x2" * (num_words == 2)) if is_cdna else f"cmpswap_b{8 * size}"
        flag = {"gfx1100": "glc", "gfx1201": "th:TH_ATOMIC_RETURN"}.get(arch, "sc0")
        both = f"v[10:{9 + 2 * num_words}]"
        line = f"global_atomic_{name} {dest}, v[2:3], {both}, off offset:{_SHIFT} {flag}"
    assert wave.run(line) == r.ALL_ENDED, line
    np.testing.assert_array_equal(place.bytes, wanted, line)
    np.testing.assert_array_equal(wave.vgpr, registers, line)


@pytest.mark.parametrize("num_words", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("arch", TARGETS)
def test_scalar_loads(arch: str, num_words: int) -> None:
    wave, given = Wave(arch), np.random.default_rng(2).integers(0, 1 << 32, 64, np.uint32)
    base = wave.memory.add(given)
    is_old = arch.startswith("gfx9")
    wave.sgpr[4], wave.sgpr[5], wave.sgpr[6] = base & 0xFFFFFFFF, base >> 32, 12
    wave.sgpr[124 if is_old else 125] = 24  # M0
    kind = f"dword{f'x{num_words}' if num_words > 1 else ''}" if is_old else f"b{32 * num_words}"
    dest = f"s[16:{15 + num_words}]" if num_words > 1 else "s16"
    for operands, first in (("0x20", 8), ("s6", 3), ("s6 offset:0x10", 7), ("m0", 6)):
        wave.sgpr[16:40] = 0
        assert wave.run(f"s_load_{kind} {dest}, s[4:5], {operands}") == r.ALL_ENDED
        found = wave.sgpr[16 : 17 + num_words]
        np.testing.assert_array_equal(found, [*given[first : first + num_words], 0], operands)


@pytest.mark.parametrize("num_words", [1, 2])
@pytest.mark.parametrize("stride", [1, 64])
@pytest.mark.parametrize("arch", TARGETS)
def test_two_places_of_lds_at_once(arch: str, stride: int, num_words: int) -> None:
    wave, rng = Wave(arch), np.random.default_rng(4)
    wave.vgpr[:] = rng.integers(0, 1 << 32, wave.vgpr.shape, np.uint32)
    wave.lds[:] = rng.integers(0, 256, wave.lds.shape, np.uint8)
    size, lanes = 4 * num_words, wave.num_lanes
    at = np.arange(lanes) * 4 * size
    wave.put(_AT, at.astype(np.uint32))
    is_old = arch.startswith("gfx9")
    read, write = ("read2", "write2") if is_old else ("load_2addr", "store_2addr")
    wide = "" if stride == 1 else "st64" if is_old else "_stride64"
    kind = f"{wide}_b{32 * num_words}"
    one, two, both = ("v10", "v20", "v[30:31]")
    if num_words == 2:
        one, two, both = "v[10:11]", "v[20:21]", "v[30:33]"
    offsets, wanted = (1, 3), wave.lds.copy()
    for lane in range(lanes):
        for offset, register in zip(offsets, (10, 20), strict=True):
            begin = at[lane] + offset * size * stride
            if begin + size <= len(wanted):
                words = wave.vgpr[register : register + num_words, lane].copy()
                wanted[begin : begin + size] = words.view(np.uint8)
    tail = f"offset0:{offsets[0]} offset1:{offsets[1]}"
    assert wave.run(f"ds_{write}{kind} v{_AT}, {one}, {two} {tail}") == r.ALL_ENDED
    if stride == 1:  # with the wider stride lanes write over each other
        np.testing.assert_array_equal(wave.lds, wanted)
    assert wave.run(f"ds_{read}{kind} {both}, v{_AT} {tail}") == r.ALL_ENDED
    for i, offset in enumerate(offsets):
        found = wave.vgpr[30 + i * num_words : 30 + (i + 1) * num_words, :lanes]
        for lane in range(lanes):
            begin = at[lane] + offset * size * stride
            raw = wave.lds[begin : begin + size]
            words = raw.copy().view(np.uint32) if len(raw) == size else np.zeros(num_words)
            np.testing.assert_array_equal(found[:, lane], words)


def test_the_last_registers_are_stored() -> None:
    """There is none behind the accumulators for a store to look at."""
    wave, memory = Wave("gfx942"), np.zeros(4, np.uint32)
    base = wave.memory.add(memory)
    wave.put(2, np.full((64, 1), base, np.uint64))
    wave.vgpr[508:512] = [[3], [5], [7], [9]]
    assert wave.run("global_store_dwordx4 v[2:3], a[252:255], off") == r.ALL_ENDED
    assert memory.tolist() == [3, 5, 7, 9]
