"""A comparison that fails for two strides the other way round, and others that fail."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("triton")
from recorded.program_launch import Launch

from hypocenter.base.dtypes import Array
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.doctor import diagnose
from hypocenter.record.compared import ComparedSide, ComparedUnequal
from hypocenter.record.fault_record import FaultRecord

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
_random = np.random.default_rng(0)
A, B = (_random.standard_normal((8, 8)).astype(np.float32) for _ in range(2))
#: With the strides of the plain matrix the one that is kept turned is read the other way round.
WANT, GAVE = A + 2 * B, A + 2 * B.T


def examined(
    by: tuple[int, int] = (8, 1),
    gave: Array = GAVE,
    want: Array = WANT,
    b: Array = B,
    text: str = ADDED,
    **changes: Any,
) -> Diagnosis:
    """Of a program that passes `by` for strides of b, which are (1, 8)."""
    tensors = dict.fromkeys(("a_ptr", "b_ptr", "y_ptr"), ("F32", (8, 8)))
    launch = Launch(
        text,
        tensors,
        {"by_row": by[0], "by_column": by[1], "width": 8}
        | ({"step": 1} if text is TWO_FACTORS else {}),
        grid=(8,),
        constants={"BLOCK": 8},
        held={"a_ptr": A, "b_ptr": b},
        strides={"b_ptr": (1, 8)},
    )
    bundle = launch.bundle(gave={"y_ptr": gave})
    y = next(tensor for tensor in bundle.tensors if tensor.name == "y_ptr")
    wrong = np.argwhere(~(np.abs(gave - want) <= 1e-3))
    row, column = map(int, wrong[0])
    sides = (
        ComparedSide(
            name="y", dtype="F32", value=float(gave[row, column]), data=gave.tobytes(),
            address=y.address + 4 * (8 * row + column), allocation=y.allocation,
        ),
        ComparedSide(
            name="want", dtype="F32", value=float(want[row, column]), data=want.tobytes()
        ),
    )  # fmt: skip
    event = ComparedUnequal(
        seq=max(event.seq for event in bundle.events) + 1, step=2, site="program.py:50",
        compared_at="program.py:49", sides=sides, shape=(8, 8), index=(row, column),
        num_different=len(wrong), num_elements=64, rtol=0.0, atol=1e-3,
    )  # fmt: skip
    fault = FaultRecord(
        kind="error", message="AssertionError", call="`assert close`", is_statement=True,
        site="program.py:50", is_asynchronous=False,
    )  # fmt: skip
    event = msgspec.structs.replace(event, **changes)
    bundle = msgspec.structs.replace(bundle, events=(*bundle.events, event), fault=fault)
    found = diagnose(bundle, allow_source=True)
    assert all(not rung.left_out for rung in found.rungs), found.rungs
    return found


def test_strides_the_other_way_round_are_the_cause_where_the_comparison_then_holds() -> None:
    [root] = examined().roots
    assert (root.cause, root.kernel, root.argument) == (Cause.WRONG_STRIDE, "added", "b_ptr")
    assert root.line == 6
    assert root.fix.startswith("Exchange the two strides: pass by_row = 1 and by_column = 8")
    assert root.culprit is None  # the kernel may have them the wrong way round
    assert "each of 64 elements satisfies the comparison" in root.proof.green


@pytest.mark.parametrize(
    "changes",
    [
        {"want": np.where(np.arange(64).reshape(8, 8) == 9, WANT + 1, WANT)},
        {"by": (1, 8), "gave": WANT, "want": WANT + 1},
        {"b": (B + B.T) / 2, "gave": A + B + B.T, "want": A + B + B.T + 1},
        {"text": TWO_FACTORS},
        {"gave": GAVE + 1},
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
