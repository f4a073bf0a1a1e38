"""What each opcode computes, against values computed another way, and planted changes of it."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from machine.amd_references import BITS, FLAGS, NUMBERS, WHOLE, flat

from hypocenter.device.amd.lower import SATURATED
from hypocenter.device.amd.values.handlers import (
    LANES,
    NUM_ROWS,
    ROW_D,
    ROW_FLAG,
    ROW_K,
    ROW_RESULT,
    address_of_meaning,
)
from hypocenter.device.amd.values.meanings import Meaning, meanings

VALUES, FLAG_VALUES = flat([BITS, WHOLE, NUMBERS]), flat([FLAGS])
NAMES = sorted({*VALUES, *FLAG_VALUES})
#: An opcode of each shape; the tier `amd` has all.
FAST = (
    "V_ADD_F32",
    "S_ADD_U32",
    "V_PERM_B32",
    "V_CVT_F16_F32",
    "V_FMA_F32",
    "V_MAD_U64_U32",
    "V_BFE_I32",
    "V_CMP_LT_F32",
    "V_CNDMASK_B32",
    "V_MBCNT_HI_U32_B32",
    "S_ASHR_I64",
    "V_MAX_F32",
)
_EDGES: dict[str, list[Any]] = {
    "u": [
        0,
        1,
        2,
        3,
        31,
        32,
        0x7F,
        0x80,
        0xFF,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x7FFFFFFF,
        0x80000000,
        0xFFFFFFFF,
        0x00200008,
        0x0C0B0A09,
        0x7FFFFFFFFFFFFFFF,
        1 << 63,
        (1 << 64) - 1,
    ],
    "f": [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        2.5,
        -2.5,
        3.99,
        255.5,
        65504.0,
        1e-7,
        1e-30,
        3e38,
        np.inf,
        -np.inf,
        np.nan,
        -4096.25,
        33.0,
        7e4,
        2.0**31,
    ],
}


def _bits(kind: str, seed: int) -> list[int]:
    """64 operands of a type, as bits; each pair of edges meets somewhere over a few seeds."""
    rng, width = np.random.default_rng(seed), int(kind[1:])
    if kind[0] == "f":
        form: Any = {16: np.float16, 32: np.float32, 64: np.float64}[width]
        with np.errstate(over="ignore"):
            edges = [form(value) for value in _EDGES["f"]]
        values = [
            *edges,
            *rng.standard_normal(22).astype(form),
            *(form(v) for v in rng.uniform(-400, 400, 22)),
        ]
        found = [int(np.array(value).view(f"u{width // 8}")) for value in values]
    else:
        found = [value % (1 << width) for value in _EDGES["u"]]
        found += [int(value) % (1 << width) for value in rng.integers(0, 1 << 63, 22)]
        found += [int(value) for value in rng.integers(0, 70, 22)]
    return [found[i] for i in rng.permutation(64)]


def _value(kind: str, bits: int) -> Any:
    width = int(kind[1:])
    if kind[0] == "f":
        form: Any = {16: np.float16, 32: np.float32, 64: np.float64}[width]
        value = np.array(bits % (1 << width), f"u{width // 8}").view(form)[()]
        return np.float32(value) if width == 16 else value
    bits %= 1 << width
    return bits - (1 << width) if kind[0] == "i" and bits >> (width - 1) else bits


def _same(kind: str, bits: int, expected: Any) -> bool:
    width = int(kind[1:])
    if kind[0] != "f":
        return bits % (1 << width) == int(expected) % (1 << width)
    form: Any = {16: np.float16, 32: np.float32, 64: np.float64}[width]
    with np.errstate(all="ignore"):
        wanted = form(expected)
    if np.isnan(wanted):
        return bool(np.isnan(_value(kind, bits)))
    return bits % (1 << width) == int(wanted.view(f"u{width // 8}"))


def _differs(name: str, meaning: Meaning, seed: int) -> str:
    """The first lane that is not what the reference says; empty where all are."""
    rows = np.zeros((NUM_ROWS, LANES), np.int64)
    operands = [_bits(kind, seed * 7 + i) for i, kind in enumerate(meaning.types)]
    if len(set(meaning.types[:2])) < len(meaning.types[:2]):
        operands[1][::5] = operands[0][::5]  # equal ones, too
    result = meaning.result_type if meaning.result_type != "none" else "u32"
    old = _bits(result, seed * 7 + 5)
    for row, bits in [*enumerate(operands), (ROW_D, old)]:
        rows[row] = np.array(bits, np.uint64).view(np.int64)
    rows[ROW_K] = np.arange(LANES) % 3 == 0
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address_of_meaning(meaning))
    call(rows.ctypes.data, LANES)
    for lane in range(LANES):
        given = {
            letter: _value(kind, bits[lane])
            for letter, kind, bits in zip("abc", meaning.types, operands, strict=False)
        }
        given |= {"d": _value(result, old[lane]), "k": int(rows[ROW_K, lane]), "lane": lane}
        with np.errstate(all="ignore"):
            if name in VALUES:
                wanted = _apply(VALUES[name], given)
                if not _same(meaning.result_type, int(rows[ROW_RESULT, lane]), wanted):
                    return (
                        f"lane {lane}: {given} gives {int(rows[ROW_RESULT, lane]):#x}, not {wanted}"
                    )
            if name in FLAG_VALUES and bool(rows[ROW_FLAG, lane]) != bool(
                _apply(FLAG_VALUES[name], given)
            ):
                return f"lane {lane}: {given} gives the flag {rows[ROW_FLAG, lane]}"
    return ""


def _apply(step: Callable[..., Any], given: dict[str, Any]) -> Any:
    if isinstance(step, np.ufunc):
        return step(*(given[letter] for letter in "abc"[: step.nin]))
    parameters = inspect.signature(step).parameters
    if any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        return step(given["a"], given["b"], given["c"])
    names = [name for name, p in parameters.items() if p.default is p.empty]
    letters = names if set(names) <= set(given) else "abc"[: len(names)]
    return step(*(given[letter] for letter in letters))


@pytest.mark.tier("amd", fast=lambda case: case.name in FAST)
@pytest.mark.parametrize("name", NAMES)
def test_an_opcode_computes_what_is_computed_another_way(name: str) -> None:
    meaning = meanings()[name]
    assert [found for seed in range(4) if (found := _differs(name, meaning, seed))] == []


@pytest.mark.parametrize("name", SATURATED)
def test_a_clamped_sum_stops_at_the_ends_of_its_type(name: str) -> None:
    meaning = SATURATED[name]
    bits = int(meaning.types[0][1:])
    is_signed = meaning.types[0][0] == "i"
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed else (0, (1 << bits) - 1)
    step, text = {
        "A": (operator.add, "a + b"),
        "S": (operator.sub, "a - b"),
        "R": (lambda a, b: b - a, "b - a"),
    }["R" if "REV" in name else name.removeprefix("V_PK_").removeprefix("V_")[0]]
    ends = {"V_CLAMPED": lambda a, b: sorted((low, step(a, b), high))[1]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.VALUES", ends)
        assert [found for seed in range(4) if (found := _differs("V_CLAMPED", meaning, seed))] == []
        plain = dataclasses.replace(meaning, result=text)
        assert any(_differs("V_CLAMPED", plain, seed) for seed in range(4))


@pytest.mark.parametrize("table", [0x00, 0x80, 0xCA, 0x96, 0xE8, 0x1F])
def test_a_table_of_truth_chooses_each_bit(table: int) -> None:
    meaning = Meaning(("u32",) * 3, "u32", f"by_truth(a, b, c, {table})")

    def by_hand(a: int, b: int, c: int) -> int:
        rows = zip(*(f"{value:032b}" for value in (a, b, c)), strict=True)
        return int("".join(str(table >> int("".join(row), 2) & 1) for row in rows), 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.VALUES", {"V_BITOP3_B32": by_hand})
        assert _differs("V_BITOP3_B32", meaning, 1) == ""
        other = dataclasses.replace(meaning, result=f"by_truth(a, b, c, {table ^ 4})")
        assert _differs("V_BITOP3_B32", other, 1) != ""


_CHANGES = (
    *((f" {old} ", f" {new} ") for old, new in ("+-", "-+", "*+", "&|", "|&", "^&", "/*")),
    *((f" {old} ", f" {new} ") for old, new in (("<<", ">>"), (">>", "<<"), ("<", "<="))),
    *((f" {old} ", f" {new} ") for old, new in (("<=", "<"), (">", ">="), (">=", ">"))),
    *((f" {old} ", f" {new} ") for old, new in (("==", "!="), ("!=", "=="))),
    *(
        ("min", "max"),
        ("max", "min"),
        ("~", "-"),
        ("if k", "if not k"),
        ("fma32(a, ", "fma32(-a, "),
    ),
    *(("np.trunc", "np.ceil"), ("np.ceil", "np.floor"), ("np.rint", "np.floor")),
    *(("np.floor", "np.ceil"), ("to_integer(a", "to_integer(-a"), ("abs(a)", "a")),
    *(("(a, b", "(b, a"), ("(b, a", "(a, b"), ("(a)", "(-a)"), ("a if", "b if")),
)


#: Changes of these change no value: who sees none of them is right.
_EQUIVALENT = ("fma32(b, a", "fma64(b, a", "med3(b, a", "ctz(-a)", "power_of(-", "64(-a))")


def changed(meaning: Meaning) -> Meaning:
    """The same opcode with a planted change of what it computes."""
    fields = ["result"] if meaning.result_type != "none" else ["flag"]
    for field in fields:
        text = getattr(meaning, field)
        for old, new in _CHANGES:
            made = text.replace(old, new, 1)
            if made != text and not any(same in made for same in _EQUIVALENT):
                return dataclasses.replace(meaning, **{field: made})
    return dataclasses.replace(meaning, result=f"{meaning.result} + 1")


@pytest.mark.tier("amd", fast=lambda case: case.name in FAST)
@pytest.mark.parametrize("name", NAMES)
def test_a_changed_opcode_is_found(name: str) -> None:
    meaning = changed(meanings()[name])
    try:
        found = any(_differs(name, meaning, seed) for seed in range(4))
    except Exception as error:  # the change does not compile
        found = "numba" in type(error).__module__
    assert found, meaning
