"""NaN that a program's launch was given where it has no weight: told, with the mask, or left."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded.program_launch import Launch

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis, Edit, RootCause
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.nonfinite import (
    NonFinite,
    NonFiniteReached,
    NumberEnd,
    NumberKind,
    NumbersWatched,
    Operand,
)

pytest.importorskip("triton")
NUM, LIVE = 16, 5
WEIGHED = """
def weigh_kernel(w_ptr, v_ptr, out_ptr, num, live, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at, mask=at < live, other=0.0)
    v = tl.load(v_ptr + at)
    tl.store(out_ptr, tl.sum(w * v, axis=0))
"""
#: The number of a row is no number of a column: nothing of the kernel says what is live.
UNMASKED = """
def weigh_kernel(w_ptr, v_ptr, out_ptr, num, live, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at)
    v = tl.load(v_ptr + at)
    tl.store(out_ptr, tl.sum(w * v, axis=0))
"""
#: Small numbers are left out of the sum, and large ones are not.
LARGE_ONES = WEIGHED.replace("w * v", "w + v * tl.where(v * v > 4.0, 1.0, 0.0)")
WHOLE = WEIGHED.replace("w * v", "w + v")
MASKED = WEIGHED.replace("tl.load(v_ptr + at)", "tl.load(v_ptr + at, mask=at < live, other=0.0)")


def found(
    text: str, *, dtype: str = "F32", weights: Any = None, values: Any = None, **more: Any
) -> Diagnosis:
    """Of a run that ended at a NaN, with `more` fields of what was watched."""
    kind = np.float16 if dtype == "F16" else np.float32
    v = np.where(np.arange(NUM) < LIVE, 2, np.nan) if values is None else values
    w = np.where(np.arange(NUM) < LIVE, 1, 0) if weights is None else weights
    launch = Launch(
        text,
        {"w_ptr": (dtype, (NUM,)), "v_ptr": (dtype, (NUM,)), "out_ptr": (dtype, (1,))},
        {"num": NUM, "live": LIVE},
        constants={"BLOCK": NUM},
        held={"w_ptr": w.astype(kind), "v_ptr": v.astype(kind), "out_ptr": np.zeros(1, kind)},
    )
    bundle = launch.bundle(gave={"out_ptr": np.full(1, np.nan, kind)})
    seq = bundle.outcomes[0].launch
    operand = Operand(name="v_ptr", dtype=dtype, shape=(NUM,), index=(LIVE,), value=math.nan)
    made = NonFinite(
        seq=seq + 1, step=1, id=1, number=1, kind=NumberKind.GIVEN, operation="weigh",
        site="program.py:40", result=operand, num_nan=NUM - LIVE, num_elements=NUM, launched=seq,
    )  # fmt: skip
    end = NonFiniteReached(seq=seq + 2, step=1, of=1, how=NumberEnd.ENDED, value=math.nan)
    watched = NumbersWatched(seq=seq + 3, step=1, num_operations=2, num_launches=1, **more)
    events = (*bundle.events, made, end, watched)
    return diagnose(msgspec.structs.replace(bundle, events=events), allow_source=True)


def padding_in(result: Diagnosis) -> RootCause | None:
    assert all(not rung.left_out for rung in result.rungs), result.rungs
    return next((r for r in result.roots if r.cause is Cause.NONFINITE_PADDING), None)


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_a_load_without_the_mask_of_its_weights_is_named_with_it(dtype: str) -> None:
    root = padding_in(found(WEIGHED, dtype=dtype))
    assert root is not None
    assert (root.kernel, root.argument, root.line) == ("weigh", "v_ptr", 5)
    assert "v_ptr[5] is not finite and has no weight" in root.sentence
    assert "11 elements of v_ptr; 1 results are not finite" in root.sentence
    assert root.fix == "Mask the access with `at < live`, as another load of the same index is"
    [edit] = root.edits
    assert (edit.line, edit.old) == (5, "v = tl.load(v_ptr + at)")
    assert "mask=at < live" in edit.new


def test_where_no_mask_is_made_it_is_told_without_one() -> None:
    root = padding_in(found(UNMASKED))
    assert root is not None
    assert (root.argument, root.line, root.edits) == ("v_ptr", 5, ())
    assert root.fix.startswith("Mask the load of v_ptr to the elements that have weight")


def test_a_mask_that_gives_other_results_is_no_fix() -> None:
    heavier = np.where(np.arange(NUM) < LIVE, 1, 0)
    text = WEIGHED.replace("mask=at < live", "mask=at < live - 1")
    root = padding_in(found(text, weights=heavier))
    assert root is not None
    edits: tuple[Edit, ...] = root.edits
    assert edits
    wider = WEIGHED.replace("at < live", "at < live + 1").replace("other=0.0)", "other=0.0) * 1")
    told = padding_in(found(wider, weights=heavier))
    assert told is not None
    assert told.edits == ()  # one lane more than has weight keeps a NaN


@pytest.mark.parametrize("text", [LARGE_ONES, WHOLE], ids=["large ones", "whole"])
def test_numbers_that_have_weight_are_no_padding(text: str) -> None:
    assert padding_in(found(text)) is None


def test_data_that_is_nan_where_it_counts_is_no_padding() -> None:
    values = np.where(np.arange(NUM) == 2, np.nan, 1.0)
    assert padding_in(found(WEIGHED, values=values)) is None


def test_what_keeps_a_result_from_being_finite_otherwise_is_the_cause() -> None:
    weights = np.where(np.arange(NUM) < LIVE, 1.0, 0.0)
    weights[2] = np.nan
    assert padding_in(found(WEIGHED, weights=weights)) is None
    text = WEIGHED.replace("tl.sum(w * v, axis=0)", "tl.sum(w * v, axis=0) * float('nan')")
    assert padding_in(found(text)) is None


def test_a_masked_load_leaves_results_finite_and_nothing_is_told() -> None:
    assert padding_in(found(MASKED)) is None


@pytest.mark.parametrize("more", [{"num_lost": 1}, {"num_in_graphs": 1}, {"problem": "lost"}])
def test_where_not_all_was_seen_another_may_have_made_it(more: dict[str, Any]) -> None:
    assert padding_in(found(WEIGHED, **more)) is None
