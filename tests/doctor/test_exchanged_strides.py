"""A comparison that fails for two strides the other way round, and others that fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
from recorded.failed_comparison import with_failed_comparison
from recorded.program_launch import Launch

from hypocenter.base.dtypes import Array
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.doctor import diagnose

ADDED = """
def added_kernel(a_ptr, b_ptr, y_ptr, by_row, by_column, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + row * width + column)
    b = tl.load(b_ptr + row * by_row + column * by_column)
    tl.store(y_ptr + row * width + column, a + 2 * b)
"""
#: Two pairs put it right: a row's number with either factor of a column's.
TWO_FACTORS = ADDED.replace("width, BLOCK", "width, step, BLOCK").replace(
    "column * by_column", "column * by_column * step"
)
#: Neither number goes into an address, though they equal two strides of b.
WEIGHTED = """
def weighted_kernel(a_ptr, b_ptr, y_ptr, weight_a, weight_b, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, BLOCK)
    y = weight_a * tl.load(a_ptr + at) + weight_b * tl.load(b_ptr + at)
    tl.store(y_ptr + at, y)
"""
_random = np.random.default_rng(0)
A, B = (_random.standard_normal((8, 8)).astype(np.float32) for _ in range(2))
#: With the strides of the plain matrix the one that is kept turned is read the other way round.
WANT, GAVE = A + 2 * B, A + 2 * B.T
#: Of a matrix that is half as high only elements in front are read then, some of them twice.
HIGH_A, HIGH_B = A[:4], B[:4]
_AT = 4 * np.arange(4)[:, None] + np.arange(8)
HIGH_WANT, HIGH_GAVE = HIGH_A + 2 * HIGH_B, HIGH_A + 2 * HIGH_B.T.reshape(-1)[_AT]


def examined(
    by: tuple[int, int] = (4, 1),
    gave: Array = HIGH_GAVE,
    want: Array = HIGH_WANT,
    a: Array = HIGH_A,
    b: Array = HIGH_B,
    text: str = ADDED,
    **changes: Any,
) -> Diagnosis:
    """Of a program that passes `by` for strides of b, which lies column by column."""
    height, width = b.shape
    tensors = dict.fromkeys(("a_ptr", "b_ptr", "y_ptr"), ("F32", b.shape))
    names = ("weight_a", "weight_b") if text is WEIGHTED else ("by_row", "by_column")
    launch = Launch(
        text,
        tensors,
        dict(zip(names, by, strict=True))
        | {"width": width}
        | ({"step": 1} if text is TWO_FACTORS else {}),
        grid=(height,),
        constants={"BLOCK": 8},
        held={"a_ptr": a, "b_ptr": b},
        strides={"b_ptr": (1, height)} if text is not WEIGHTED else {"b_ptr": (width, 1)},
    )
    bundle = launch.bundle(gave={"y_ptr": gave})
    bundle = with_failed_comparison(bundle, gave, want, **changes)
    found = diagnose(bundle, allow_source=True)
    assert all(not rung.left_out for rung in found.rungs), found.rungs
    return found


def test_strides_the_other_way_round_are_the_cause_where_elements_are_passed_over_for_them() -> (
    None
):
    [root] = examined().roots
    assert (root.cause, root.kernel, root.argument) == (Cause.WRONG_STRIDE, "added", "b_ptr")
    assert root.line == 6
    assert root.fix.startswith("Exchange the two strides: pass by_row = 1 and by_column = 4")
    assert root.culprit is None  # the kernel may have them the wrong way round
    assert (
        "12 of 32 elements of b_ptr, whose strides are (1, 4), are never touched" in root.proof.red
    )
    assert "each of 32 elements satisfies the comparison" in root.proof.green


SQUARE: dict[str, Any] = {"by": (8, 1), "gave": GAVE, "want": WANT, "a": A, "b": B}


@pytest.mark.parametrize(
    "changes",
    [
        SQUARE,
        SQUARE | {"by": (1, 8), "gave": WANT, "want": GAVE},
        {"by": (1, 4), "gave": HIGH_WANT, "want": HIGH_GAVE},
    ],
    ids=["read whole either way", "the expectation is turned", "and leaves elements out"],
)
def test_the_comparison_alone_proves_nothing(changes: dict[str, Any]) -> None:
    """A kernel may be meant to read b turned, and a program may expect it turned."""
    found = examined(**changes)
    assert found.roots == ()
    [seen] = [h for h in found.hypotheses if h.diagnostic == "failed comparison"]
    assert (seen.verdict, seen.cause) == (Verdict.INCONCLUSIVE, Cause.WRONG_STRIDE)
    assert (seen.kernel, seen.argument) == ("added", "b_ptr")
    assert "each element satisfies the comparison" in seen.evidence[1]


@pytest.mark.parametrize("by", [(8, 1), (1, 8)])
def test_numbers_that_go_into_no_address_are_no_strides(by: tuple[int, int]) -> None:
    there, turned = (one * A + other * B for one, other in (by, by[::-1]))
    found = examined(by, there, turned, A, B, WEIGHTED)
    assert found.roots == ()
    assert found.compared is not None
    assert not [h for h in found.hypotheses if h.diagnostic == "failed comparison"]


@pytest.mark.parametrize(
    "changes",
    [
        {"want": np.where(np.arange(32).reshape(4, 8) == 9, HIGH_WANT + 1, HIGH_WANT)},
        {"by": (1, 4), "gave": HIGH_WANT, "want": HIGH_WANT + 1},
        SQUARE | {"b": (B + B.T) / 2, "gave": A + B + B.T, "want": A + B + B.T + 1},
        {"text": TWO_FACTORS},
        {"gave": HIGH_GAVE + 1},
        {"atol": None},
        {"is_first": False},
        {"text": ADDED.replace("+ 2 * b", "+ 2 * b + 0.01 * row")},
    ],
    ids=[
        "one element is wrong in another way",
        "they are right already",
        "it makes no difference",
        "two pairs put it right",
        "another wrote it",
        "no bound is known",
        "a mean is compared",
        "another replay",
    ],
)
def test_strides_that_do_not_explain_all_of_it_are_not_blamed(changes: dict[str, Any]) -> None:
    found = examined(**changes)
    assert found.roots == ()
    assert found.compared is not None
    assert not [h for h in found.hypotheses if h.diagnostic == "failed comparison"]
