"""Conversions of numbers of 8 bits: every code, and the edges of rounding, by exact fractions."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from machine.amd_wave import Wave

from hypocenter.base.dtypes import Array
from hypocenter.device.amd import instruction_rows as r

ARCHS = ("gfx942", "gfx950", "gfx1201")
KINDS = ("fp8", "bf8")
_OLD = 0xDEADBEEF
_SCALES = (1.0, 0.5, 4.0, 3.0, -8.0, 2.0**-20, 1.75 * 2.0**20, np.inf)


@cache
def _numbers(arch: str, kind: str) -> tuple[Fraction | float, ...]:
    """What each of the 256 codes is; the formats of OCP, and those without -0 on gfx942."""
    num_bits = 3 if kind == "fp8" else 2
    bias = (7 if kind == "fp8" else 15) + (arch == "gfx942")
    found: list[Fraction | float] = []
    for code in range(256):
        exponent, fraction = divmod(code & 127, 1 << num_bits)
        sign = -1 if code > 127 else 1
        whole = fraction + (1 << num_bits if exponent else 0)
        size = Fraction(whole, 1 << num_bits) * Fraction(2) ** (max(exponent, 1) - bias)
        number: Fraction | float = sign * size
        if arch == "gfx942":
            number = float("nan") if code == 128 else number
        elif kind == "fp8" and code & 127 == 127:
            number = float("nan")
        elif kind == "bf8" and exponent == 31:
            number = float("nan") if fraction else sign * float("inf")
        found.append(number)
    return tuple(found)


@cache
def _sizes(arch: str, kind: str) -> list[Fraction]:
    """Finite magnitudes by their codes, and the one that would be next."""
    sizes = [each for each in _numbers(arch, kind)[:128] if isinstance(each, Fraction)]
    return [*sizes, 2 * sizes[-1] - sizes[-2]]


def _codes(value: float, arch: str, kind: str) -> set[int]:
    """The codes that a conversion of a number may give; several only where they are NaN."""
    numbers = _numbers(arch, kind)
    nans = {code for code, number in enumerate(numbers) if number != number}
    if np.isnan(value):
        return nans
    sign = 128 if np.signbit(value) else 0
    beyond = {0x7C | sign} if kind == "bf8" and arch != "gfx942" else nans
    sizes = _sizes(arch, kind)
    if np.isinf(value) or Fraction(abs(value)) >= sizes[-1]:
        return beyond
    exact = Fraction(abs(value))
    code = bisect_left(sizes, exact)
    if code and (exact - sizes[code - 1], (code - 1) % 2) < (sizes[code] - exact, code % 2):
        code -= 1
    if code == len(sizes) - 1:
        return beyond
    return {0} if arch == "gfx942" and code == 0 else {code | sign}


def _edges(arch: str, kind: str) -> Array:
    """Every number, every middle of two, and their neighbours in float32, of either sign."""
    sizes = _sizes(arch, kind)
    middles = [(low + high) / 2 for low, high in pairwise(sizes)]
    given = np.array([float(each) for each in [*sizes, *middles]], np.float32)
    others = np.array([0, 1e-45, 1e-38, 465, 65504, 3e38, np.inf, np.nan], np.float32)
    near = [np.nextafter(given, np.float32(to)) for to in (0, np.inf)]
    every = np.concatenate([given, *near, others])
    return np.concatenate([every, -every])


def _run(arch: str, text: str, *operands: Array) -> Array:
    """uint32[n, 2]: v6 and v7 after the line, for operands in v1, v2, v3 of any number of lanes."""
    found = []
    size = Wave(arch).num_lanes
    for begin in range(0, len(operands[0]), size):
        wave = Wave(arch)
        wave.vgpr[6:8] = _OLD
        for register, values in enumerate(operands, 1):
            part = values[begin : begin + size]
            wave.put(register, part)
        assert wave.run(text) == r.ALL_ENDED
        found.append(wave.get(6, "u4", 2)[: len(operands[0]) - begin])
    return np.concatenate(found)


def _unlike(found: Array, wanted: Array) -> list[int]:
    """Where two arrays of float32 bits are not the same number; any NaN is NaN."""
    numbers = wanted.astype(np.float32)
    with np.errstate(invalid="ignore"):
        same = (found == numbers.view(np.uint32)) | (
            np.isnan(found.view(np.float32)) & np.isnan(numbers)
        )
    return np.flatnonzero(~same).tolist()


def _wanted(arch: str, kind: str) -> Array:
    """float64[256]: what each code is, with the sign of zero."""
    signs = np.where(np.arange(256) > 127, -1.0, 1.0)
    found: Array = np.copysign([float(each) for each in _numbers(arch, kind)], signs)
    return found


def _select(arch: str, name: str, dest: str, part: int) -> str:
    """The line that converts a byte (or a word, of two numbers) of v1, as each target writes it."""
    word = "WORD" if name.startswith("pk") else "BYTE"
    if arch != "gfx1201":
        return f"v_cvt_{name}_sdwa {dest}, v1 src0_sel:{word}_{part}"
    chosen = f" op_sel:[{part},0]" if word == "WORD" else f" byte_sel:{part}"
    return f"v_cvt_{name} {dest}, v1{chosen if part else ''}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_code_becomes_its_number(arch: str, kind: str) -> None:
    codes = np.arange(256, dtype=np.uint32)
    wanted = _wanted(arch, kind)
    assert _unlike(_run(arch, f"v_cvt_f32_{kind} v6, v1", codes)[:, 0].copy(), wanted) == []
    for part in range(4):
        given = codes << (8 * part) | np.uint32(0x5A5A5A5A & ~(255 << 8 * part))
        line = _select(arch, f"f32_{kind}", "v6", part)
        assert _unlike(_run(arch, line, given)[:, 0].copy(), wanted) == [], line
    for part in range(2):
        given = (codes | codes[::-1] << 8) << (16 * part) | np.uint32(0x5A5A << (16 - 16 * part))
        line = _select(arch, f"pk_f32_{kind}", "v[6:7]", part)
        found = _run(arch, line, given)
        assert _unlike(found[:, 0].copy(), wanted) == [], line
        assert _unlike(found[:, 1].copy(), wanted[::-1]) == [], line


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.tier("amd", fast=lambda case: (case.kind == "fp8") == (case.arch != "gfx950"))
def test_numbers_become_the_nearest_code_at_every_edge(arch: str, kind: str) -> None:
    values = _edges(arch, kind)
    others = values[::-1].copy()
    for part in range(2):
        line = f"v_cvt_pk_{kind}_f32 v6, v1, v2" + (" op_sel:[0,0,1]" if part else "")
        found = _run(arch, line, values, others)[:, 0]
        kept, made = (_OLD & 0xFFFF, found >> 16) if part else (_OLD >> 16, found & 0xFFFF)
        assert set((found & 0xFFFF if part else found >> 16).tolist()) == {kept}
        for place, given in ((0, values), (8, others)):
            wrong = [
                (float(value), code)
                for value, code in zip(given, (made >> place & 255).tolist(), strict=True)
                if code not in _codes(float(value), arch, kind)
            ]
            assert wrong == [], line


def test_a_sign_is_changed_before_a_number_is_rounded() -> None:
    values = np.array([1.0, -3.3, 300.0], np.float32)
    found = _run("gfx942", "v_cvt_pk_fp8_f32 v6, -v1, |v2|", values, values)[:, 0]
    for value, code in zip(values.tolist(), found.tolist(), strict=True):
        assert code & 255 in _codes(-value, "gfx942", "fp8")
        assert code >> 8 & 255 in _codes(abs(value), "gfx942", "fp8")


def _power(scale: float) -> float:
    """Of a scale the exponent counts alone."""
    return float("nan") if np.isinf(scale) else float(2.0 ** np.floor(np.log2(abs(scale))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", _SCALES)
@pytest.mark.tier("amd", fast=lambda case: case.scale in (3.0, np.inf))
def test_scaled_conversions_take_the_exponent_of_the_scale(scale: float, kind: str) -> None:
    codes, power = np.arange(256, dtype=np.uint32), _power(scale)
    wanted = _wanted("gfx950", kind) * power
    scales = np.full(256, scale, np.float32)
    found = _run("gfx950", f"v_cvt_scalef32_f32_{kind} v6, v1, v2", codes, scales)
    assert _unlike(found[:, 0].copy(), wanted) == []
    given = codes | codes[::-1] << 8
    found = _run("gfx950", f"v_cvt_scalef32_pk_f32_{kind} v[6:7], v1, v2", given, scales)
    assert _unlike(found[:, 0].copy(), wanted) == []
    assert _unlike(found[:, 1].copy(), wanted[::-1]) == []
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = _edges("gfx950", kind) * np.float32(1.0 if np.isnan(power) else power)
    line = f"v_cvt_scalef32_pk_{kind}_f32 v6, v1, v2, v3"
    scales = np.full(len(values), scale, np.float32)
    made = _run("gfx950", line, values, values[::-1].copy(), scales)[:, 0]
    assert set((made >> 16).tolist()) == {_OLD >> 16}
    for value, code in zip(values.tolist(), (made & 255).tolist(), strict=True):
        assert code in _codes(value / power, "gfx950", kind), value


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_conversions_choose_bytes_and_halves(kind: str) -> None:
    codes, scales = np.arange(256, dtype=np.uint32), np.full(256, 4.0, np.float32)
    wanted = _wanted("gfx950", kind) * 4.0
    for part in range(4):
        line = f"v_cvt_scalef32_f32_{kind} v6, v1, v2 op_sel:[{part & 1},{part >> 1},0]"
        given = codes << (8 * part) | np.uint32(0x5A5A5A5A & ~(255 << 8 * part))
        found = _run("gfx950", line, given, scales)
        assert _unlike(found[:, 0].copy(), wanted) == [], line
    given = (codes | codes[::-1] << 8) << 16 | np.uint32(0x5A5A)
    line = f"v_cvt_scalef32_pk_f32_{kind} v[6:7], v1, v2 op_sel:[1,0,0]"
    found = _run("gfx950", line, given, scales)
    assert _unlike(found[:, 0].copy(), wanted) == []
    assert _unlike(found[:, 1].copy(), wanted[::-1]) == []
    line = f"v_cvt_scalef32_pk_{kind}_f32 v6, v1, v2, v3 op_sel:[0,0,0,1]"
    ones = np.ones(64, np.float32)
    found = _run("gfx950", line, 4 * ones, -8 * ones, 4 * ones)[:, 0]
    [first], [second] = _codes(1.0, "gfx950", kind), _codes(-2.0, "gfx950", kind)
    assert set(found.tolist()) == {(second << 8 | first) << 16 | _OLD & 0xFFFF}


def test_a_scale_whose_exponent_is_zero_is_the_least_power() -> None:
    zeros = np.array([0.0, 1e-45, -0.0], np.float32)
    ones = np.full(3, _codes(1.0, "gfx950", "fp8").pop(), np.uint32)
    found = _run("gfx950", "v_cvt_scalef32_f32_fp8 v6, v1, v2", ones, zeros)[:, 0]
    assert _unlike(found.copy(), np.full(3, 2.0**-127)) == []


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
@pytest.mark.parametrize("signs", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_products_of_bytes_with_the_signs_that_are_asked_for(
    arch: str, signs: tuple[int, int]
) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 256, (2, 32, 4)).astype(np.uint8)
    c = rng.integers(0, 1 << 32, 32).astype(np.uint32)
    x, y = (
        each.view(np.int8).astype(np.int64) if sign else each.astype(np.int64)
        for each, sign in zip((a, b), signs, strict=True)
    )
    wanted = ((x * y).sum(1) + c.astype(np.int64)) % (1 << 32)
    line = f"v_dot4_i32_iu8 v6, v1, v2, v3 neg_lo:[{signs[0]},{signs[1]},0]"
    found = _run(arch, line, a.view(np.uint32)[:, 0], b.view(np.uint32)[:, 0], c)[:, 0]
    assert found.tolist() == wanted.tolist()


#: The case of each test that is cheap enough for every push.
_FAST_HALVES = ("bf8", "bf16", -12.0)
_HALVES = {"f16": (np.float16, "f2"), "bf16": (np.uint16, "u2")}


def _rounded(values: Array, kind: str) -> Array:
    """float64 to the numbers that halves of a kind have, as float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "f16":
            return values.astype(np.float16).astype(np.float64)
        bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        near = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32)
        made: Array = near.view(np.float32).astype(np.float64)
        return np.where(np.isnan(values), np.nan, made)


def _pair(found: Array, kind: str) -> tuple[Array, Array]:
    """float64: the low and the high half of each register."""
    low, high = (_wide(part, kind) for part in (found & 0xFFFF, found >> 16))
    return low, high


def _wide(bits: Array, kind: str) -> Array:
    if kind == "f16":
        return bits.astype(np.uint16).view(np.float16).astype(np.float64)
    return (bits << 16).astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.mark.tier("amd", fast=lambda case: (case.kind, case.half, case.scale) == _FAST_HALVES)
@pytest.mark.parametrize("scale", [1.0, -12.0, 2.0**-20])
@pytest.mark.parametrize("half", _HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_become_halves_over_a_scale(kind: str, half: str, scale: float) -> None:
    codes, scales = np.arange(256, dtype=np.uint32), np.full(256, scale, np.float32)
    wanted = _rounded(_wanted("gfx950", kind) * _power(scale), half)
    for part in range(2):
        given = (codes | codes[::-1] << 8) << (16 * part) | np.uint32(0x5A5A << (16 - 16 * part))
        line = f"v_cvt_scalef32_pk_{half}_{kind} v6, v1, v2 op_sel:[{part},0,0]"
        low, high = _pair(_run("gfx950", line, given, scales)[:, 0], half)
        np.testing.assert_array_equal(low, wanted, line)
        np.testing.assert_array_equal(high, wanted[::-1], line)
    if half == "bf16":
        return
    for part in range(4):
        given = codes << (8 * part) | np.uint32(0x5A5A5A5A & ~(255 << 8 * part))
        for which in (0, 1):
            chosen = f"op_sel:[{part & 1},{part >> 1},{which}]"
            line = f"v_cvt_scalef32_f16_{kind} v6, v1, v2 {chosen}"
            found = _run("gfx950", line, given, scales)[:, 0]
            np.testing.assert_array_equal(_pair(found, half)[which], wanted, line)
            assert set((found >> (16 - 16 * which) & 0xFFFF).tolist()) == {
                _OLD >> (16 - 16 * which) & 0xFFFF
            }


@pytest.mark.parametrize("wide", ["f32", "f16", "bf16"])
def test_numbers_of_4_bits_become_wider_ones_over_a_scale(wide: str) -> None:
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = np.array([*sizes, *(-size for size in sizes)])
    codes, scales = np.arange(256, dtype=np.uint32), np.full(256, 12.0, np.float32)
    low, high = numbers[codes & 15] * 8.0, numbers[codes >> 4] * 8.0
    for part in range(4):
        given = codes << (8 * part) | np.uint32(0xA5A5A5A5 & ~(255 << 8 * part))
        dest = "v[6:7]" if wide == "f32" else "v6"
        line = f"v_cvt_scalef32_pk_{wide}_fp4 {dest}, v1, v2 op_sel:[{part & 1},{part >> 1},0]"
        found = _run("gfx950", line, given, scales)
        if wide == "f32":
            made: tuple[Array, ...] = (found[:, 0].copy(), found[:, 1].copy())
            assert [_unlike(x, y) for x, y in zip(made, (low, high), strict=True)] == [[], []]
            continue
        for x, y in zip(_pair(found[:, 0], wide), (low, high), strict=True):
            np.testing.assert_array_equal(x, y, line)


@pytest.mark.tier("amd", fast=lambda case: (case.kind, case.half) == _FAST_HALVES[:2])
@pytest.mark.parametrize("half", _HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_halves_become_the_nearest_code_over_a_scale(kind: str, half: str) -> None:
    values = np.concatenate([_rounded(_edges("gfx950", kind).astype(np.float64), half) * 4.0])
    with np.errstate(over="ignore"):
        if half == "f16":
            bits = values.astype(np.float16).view(np.uint16).astype(np.uint32)
        else:
            bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint32)
    numbers = _pair(bits, half)[0]
    scales = np.full(len(bits), 4.0, np.float32)
    for which in (0, 1):
        line = f"v_cvt_scalef32_pk_{kind}_{half} v6, v1, v2 op_sel:[0,0,{which}]"
        found = _run("gfx950", line, bits | bits[::-1] << 16, scales)[:, 0]
        assert set((found >> (16 - 16 * which) & 0xFFFF).tolist()) == {
            _OLD >> (16 - 16 * which) & 0xFFFF
        }
        for place, given in ((0, numbers), (8, numbers[::-1])):
            codes = (found >> (16 * which + place) & 255).tolist()
            wrong = [
                (value, code)
                for value, code in zip(given.tolist(), codes, strict=True)
                if code not in _codes(value / 4.0, "gfx950", kind)
            ]
            assert wrong == [], line
