"""The steps of AMD's division, in the order in which compilers write them, against exact quotients.

The manuals give V_DIV_FMAS the factor 2^32. With that, or with one factor for all, quotients near
the largest number and below the smallest normal one come out wrong: the second test plants both.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from hypocenter.base.dtypes import Array
from hypocenter.device.amd.values.handlers import (
    LANES,
    NUM_ROWS,
    ROW_FLAG,
    ROW_K,
    ROW_RESULT,
    address_of_meaning,
)
from hypocenter.device.amd.values.meanings import Meaning, meanings

_FORMS: dict[str, tuple[Any, Any, int, int]] = {
    "F32": (np.float32, np.uint32, 24, -126),
    "F64": (np.float64, np.uint64, 53, -1022),
}
Meanings = dict[str, Meaning]


def _call(meaning: Meaning, form: str, *operands: Array, condition: Array | None = None) -> Any:
    """Results as numbers, and the flags; 64 lanes at once."""
    kind, word, _, _ = _FORMS[form]
    rows = np.zeros((NUM_ROWS, LANES), np.int64)
    for row, values in enumerate(operands):
        rows[row] = values.view(word).astype(np.uint64).view(np.int64)
    if condition is not None:
        rows[ROW_K] = condition
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address_of_meaning(meaning))(
        rows.ctypes.data, LANES
    )
    return rows[ROW_RESULT].view(np.uint64).astype(word).view(kind), rows[ROW_FLAG].copy()


def divided(num: Array, den: Array, form: str, known: Meanings) -> Array:
    """num / den by the steps that LLVM makes of a division."""

    def step(name: str, *operands: Array, **more: Array) -> Any:
        return _call(known[f"V_{name}_{form}"], form, *operands, **more)

    one = np.ones_like(num)
    d, _ = step("DIV_SCALE", den, den, num)
    n, is_scaled = step("DIV_SCALE", num, den, num)
    r, _ = step("RCP", d)
    for _ in range(1 if form == "F32" else 2):
        r, _ = step("FMA", step("FMA", -d, r, one)[0], r, r)
    q, _ = step("MUL", n, r)
    if form == "F32":
        q, _ = step("FMA", step("FMA", -d, q, n)[0], r, q)
    q, _ = step("DIV_FMAS", step("FMA", -d, q, n)[0], r, q, condition=is_scaled)
    fixed: Array = step("DIV_FIXUP", q, den, num)[0]
    return fixed


def exact(num: Any, den: Any, form: str) -> Any:
    """The quotient, rounded once to nearest even, from a rational number."""
    kind, _, digits, smallest = _FORMS[form]
    if not (np.isfinite(num) and np.isfinite(den)) or num == 0 or den == 0:
        with np.errstate(all="ignore"):
            return num / den
    value = Fraction(float(num)) / Fraction(float(den))
    power = abs(value.numerator).bit_length() - value.denominator.bit_length()
    power = max(power - (abs(value) < Fraction(2) ** power), smallest)
    step = Fraction(2) ** (power - digits + 1)
    rounded = round(value / step) * step  # Python rounds halves to even
    top = Fraction(float(np.finfo(kind).max))
    if abs(rounded) > top:
        return kind(np.inf if rounded > 0 else -np.inf)
    return np.copysign(kind(float(rounded)), kind(float(num > 0) - 0.5) * np.copysign(kind(1), den))


def _numbers(form: str, seed: int) -> tuple[Array, Array]:
    """Numerators and denominators of every size, with those that are none."""
    kind, _, digits, smallest = _FORMS[form]
    rng, low = np.random.default_rng(seed), smallest - digits + 1
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], kind)

    def some() -> Array:
        sizes = rng.integers(low, -smallest + 1, LANES).astype(np.int32)
        if seed % 2:  # near both ends
            ends = rng.integers(0, 30, LANES)
            sizes = np.where(rng.random(LANES) < 0.5, low + ends, -smallest - ends).astype(np.int32)
        values = np.ldexp(rng.uniform(1, 2, LANES).astype(kind), sizes).astype(kind)
        signed: Array = values * rng.choice(np.array([-1, 1], kind), LANES)
        return signed

    num, den = some(), some()
    num[:6], den[3:9] = special, special
    return num, den


def _wrong(form: str, known: Meanings, num_seeds: int) -> list[str]:
    found = []
    for seed in range(num_seeds):
        num, den = _numbers(form, seed)
        with np.errstate(all="ignore"):
            given = divided(num, den, form, known)
        for lane in range(LANES):
            wanted = exact(num[lane], den[lane], form)
            is_same = given[lane].tobytes() == wanted.tobytes()
            if not is_same and not np.isnan([given[lane], wanted]).all():
                found.append(f"{num[lane]!r} / {den[lane]!r}: {given[lane]!r}, not {wanted!r}")
    return found


@pytest.mark.parametrize("form", _FORMS)
def test_a_division_is_the_nearest_number_to_the_exact_quotient(form: str) -> None:
    assert _wrong(form, meanings(), 24) == []


@pytest.mark.tier("amd", fast=lambda case: (case.name, case.form) == ("DIV_FMAS", "F32"))
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("name", ["DIV_SCALE", "DIV_FMAS", "DIV_FIXUP"])
def test_a_changed_step_of_the_division_is_found(form: str, name: str) -> None:
    key = f"V_{name}_{form}"
    was = meanings()[key]
    changes = {
        "DIV_SCALE": [replace(was, flag="False"), replace(was, result="a")],
        "DIV_FMAS": [
            replace(
                was, result=f"fma{form[1:]}(a, b, c) * as_f{form[1:]}({by}) if k else {was.result}"
            )
            for by in _factors(form)
        ],
        "DIV_FIXUP": [replace(was, result="a")],
    }
    for meaning in changes[name]:
        assert _wrong(form, {**meanings(), key: meaning}, 8), meaning


def _factors(form: str) -> list[int]:
    """2^32, 2^64 and 2^-64 as bits, or twice these powers."""
    _, _, digits, _ = _FORMS[form]
    bias = 127 if form == "F32" else 1023
    step = 1 if form == "F32" else 2
    return [(bias + step * by) << (digits - 1) for by in (32, 64, -64)]
