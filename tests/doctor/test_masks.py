"""An access that its own mask lets outside: the mask is to blame, and what would be right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.program_launch import Launch

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.doctor.edits.bound_text import lower_bounds
from hypocenter.doctor.kernel_text import guard_line
from hypocenter.doctor.mask_text import accesses_at, bound_edits, strict_edits
from hypocenter.record.events import SourceRecord

SOFTMAX = """@triton.jit
def rows_kernel(x, out, N, B: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, B)
    v = tl.load(x + row * N + cols, mask=cols <= N, other=0.0)
    tl.store(out + row * N + cols, v * 2.0, mask=cols < N)
"""
MATMUL = """@triton.jit
def product_kernel(a, b, c, M, K, BM: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rk = tl.arange(0, BK)
    total = tl.zeros((BM,), tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + rm[:, None] * K + (k + rk)[None, :], mask=rm[:, None] < M, other=0.0)
        right = tl.load(b + k + rk, mask=k + rk < K, other=0.0)
        total += tl.sum(left * right[None, :], axis=1)
    tl.store(c + rm, total, mask=rm < M)
"""
POINTERS = """@triton.jit
def walk_kernel(a, b, c, M, K, BM: tl.constexpr, BK: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rk = tl.arange(0, BK)
    total = tl.zeros((BM,), tl.float32)
    at = a + rm[:, None] * K + rk[None, :]
    for k in range(0, tl.cdiv(K, BK)):
        left = tl.load(at, mask=rm[:, None] < M, other=0.0)
        right = tl.load(b + k * BK + rk, mask=rk < K - k * BK, other=0.0)
        total += tl.sum(left * right[None, :], axis=1)
        at += BK
    tl.store(c + rm, total, mask=rm < M)
"""
SMALL = SOFTMAX.replace("cols <= N", "cols < N")


def floats(**shapes: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("F32", shape) for name, shape in shapes.items()}


def root_of(launch: Launch) -> RootCause | None:
    return next(iter(launch.diagnosis().roots), None)


ROWS = Launch(SOFTMAX, floats(x=(4, 60), out=(4, 60)), {"N": 60}, (4,), {"B": 64})
TILES = Launch(
    MATMUL, floats(a=(8, 40), b=(40,), c=(8,)), {"M": 8, "K": 40}, (1,), {"BM": 8, "BK": 16}
)
WALK = replace(TILES, text=POINTERS)


@dataclass(frozen=True)
class Expected:
    launch: Launch
    cause: Cause
    argument: str
    line: int
    fix: str
    change: str


CASES = {
    "<= where < is right, in the call": Expected(
        ROWS, Cause.OFF_BY_ONE, "x", 5, "Compare with < instead of <= in `cols <= N`",
        "`cols < N` in line 5",
    ),
    "the same, the other way round": Expected(
        replace(ROWS, text=SOFTMAX.replace("cols <= N", "N >= cols")), Cause.OFF_BY_ONE, "x", 5,
        "Compare with > instead of >= in `N >= cols`", "`N > cols` in line 5",
    ),
    "the same, made in a line before": Expected(
        replace(
            ROWS,
            text=SOFTMAX.replace("    v = ", "    live = (cols >= 0) & (cols <= N)\n    v = ")
            .replace("mask=cols <= N", "mask=live"),
        ),
        Cause.OFF_BY_ONE, "x", 5, "Compare with < instead of <=", "`cols < N` in line 5",
    ),
    "a loop over K without its mask": Expected(
        TILES, Cause.MISSING_MASK, "a", 7, "Mask the access with `(k + rk)[None, :] < K` as well",
        "`(k + rk)[None, :] < K` in the mask of line 7",
    ),
    "the same, where a pointer walks": Expected(
        WALK, Cause.MISSING_MASK, "a", 8, "Mask the access with `rk[None, :] < K - k * BK` as well",
        "`rk[None, :] < K - k * BK` in the mask of line 8",
    ),
    "no mask at all": Expected(
        replace(ROWS, text=SOFTMAX.replace(", mask=cols <= N, other=0.0", "")),
        Cause.MISSING_MASK, "x", 5, "Mask the access with `cols < N`", "`cols < N` as the mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_mask_comes_first_and_was_tried(name: str) -> None:
    expected = CASES[name]
    root = root_of(expected.launch)
    assert root is not None
    assert (root.cause, root.argument, root.line) == (
        expected.cause, expected.argument, expected.line,
    )  # fmt: skip
    assert root.fix.startswith(expected.fix)
    assert root.proof.corrected.startswith(expected.change)
    assert "the same replay with" in root.proof.green
    assert "large" not in root.fix


def test_a_race_beside_a_wrong_mask_is_told_after_it() -> None:
    total = SOFTMAX.replace("tl.store(out + row * N + cols, v * 2.0, mask=cols < N)",
                            "tl.store(out, tl.sum(v, axis=0))")  # fmt: skip
    found = replace(ROWS, text=total).diagnosis().roots
    assert [(root.cause, root.argument) for root in found] == [
        (Cause.OFF_BY_ONE, "x"), (Cause.PROGRAM_RACE, "out"),
    ]  # fmt: skip
    assert "a grid of one program" in found[1].proof.corrected
    # It is one as well where it is of the very tensor, and where another defect stays too.
    inplace = replace(ROWS, text=total.replace("tl.store(out,", "tl.store(x,")).diagnosis().roots
    assert [(root.cause, root.argument) for root in inplace] == [
        (Cause.OFF_BY_ONE, "x"), (Cause.PROGRAM_RACE, "x"),
    ]  # fmt: skip
    third = replace(ROWS, text=f"{total}    tl.store(out + N * 4 + row, 1.0)\n").diagnosis().roots
    assert [(root.cause, root.argument) for root in third] == [
        (Cause.OFF_BY_ONE, "x"), (Cause.PROGRAM_RACE, "out"),
    ]  # fmt: skip
    # Rows that run into each other for want of a mask race by that alone.
    rows = SMALL.replace(", mask=cols < N)", ")")
    assert [root.cause for root in replace(ROWS, text=rows).diagnosis().roots] == [
        Cause.MISSING_MASK
    ]


def test_a_mask_that_is_right_leaves_the_tensor_to_blame() -> None:
    """Its bound is the width of the rows that were asked for, and the tensor has fewer."""
    root = root_of(replace(ROWS, text=SMALL, tensors=floats(x=(4, 60), out=(3, 60))))
    assert root is not None
    assert "<=" not in root.fix
    assert root.cause is not Cause.OFF_BY_ONE


@pytest.mark.parametrize("launch", [replace(ROWS, text=SMALL), replace(TILES, constants={
    "BM": 8, "BK": 8})])  # fmt: skip
def test_a_healthy_launch_has_no_root(launch: Launch) -> None:
    assert root_of(launch) is None


def source(text: str) -> SourceRecord:
    return SourceRecord(id="1", function="k", file="k.py", first_line=11, text=text)


def test_what_a_mask_is_made_of_is_found_where_it_stands() -> None:
    kernel = source(SOFTMAX)
    assert guard_line(kernel, 15) == (15, "cols <= N")
    [access] = accesses_at(kernel, 15, "x")
    [edit] = strict_edits(kernel, access)
    assert (edit.line, edit.was, edit.now) == (15, "cols <= N", "cols < N")
    assert edit.text == SMALL
    assert not list(bound_edits(kernel, access, ["N"]))


def test_a_lower_bound_is_not_made_strict() -> None:
    kernel = source(SOFTMAX.replace("cols <= N", "(cols >= 0) & (cols < N)"))
    [access] = accesses_at(kernel, 15, "x")
    assert not list(strict_edits(kernel, access))


@pytest.mark.parametrize(
    ("address", "condition"),
    [("x + cols", "cols >= 0"), ("x + (cols - 1)", "cols - 1 >= 0"),
     ("x + cols - 1", "cols - 1 >= 0"), ("x", None)],
)  # fmt: skip
def test_an_index_that_may_be_negative(address: str, condition: str | None) -> None:
    kernel = source(SOFTMAX.replace("x + row * N + cols", address).replace("<= N", "< N"))
    [access] = accesses_at(kernel, 15, "x")
    assert list(lower_bounds(access)) == [condition] * (condition is not None)


def bounds(text: str, line: int) -> list[Any]:
    kernel = source(text)
    [access] = accesses_at(kernel, line, "a")
    return [edit.now for edit in bound_edits(kernel, access, ["M", "K"])]


def test_bounds_are_those_of_the_loop_first() -> None:
    assert bounds(MATMUL, 17)[0] == "(k + rk)[None, :] < K"
    assert bounds(POINTERS, 18)[0] == "rk[None, :] < K - k * BK"
