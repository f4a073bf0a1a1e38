"""A sum that leaves its type is an operation that made infinity; one that passes it on is none."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")
from recorded.program_launch import Launch

from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import OUTSIDE_PLANS, Launched, Place
from hypocenter.replay.numbers import NumberTrace, trace_numbers

SUMS = """
def sums_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(y_ptr, tl.sum(x, axis=0))
"""


def trace_of(last: float) -> NumberTrace | None:
    """Of the sum of 15 numbers of 10,000 and a last one, in float16."""
    x = np.full(16, 10_000, np.float16)
    x[15] = last
    tensors = {"x_ptr": ("F16", (16,)), "y_ptr": ("F16", (1,))}
    launch = Launch(SUMS, tensors, constants={"BLOCK": 16}, held={"x_ptr": x})
    bundle = launch.bundle(gave={"y_ptr": np.full(1, np.inf, np.float16)})
    [event] = [event for event in bundle.events if isinstance(event, Launched)]
    place = Place(event.step, OUTSIDE_PLANS, event.seq)
    return trace_numbers(BundleIndex(bundle), place, "y_ptr", (0,), allow_source=True)


def test_a_sum_that_leaves_its_type_is_named() -> None:
    trace = trace_of(10_000)
    assert trace is not None
    step = trace.step
    assert (step.operation, step.lane, step.operands) == ("reduce", (0,), ())
    assert (step.sites[0].expression, step.sites[0].line) == ("tl.sum(x, axis=0)", 4)
    assert (step.value, trace.changed) == (np.inf, 0.0)


def test_a_sum_of_what_is_infinite_already_made_nothing() -> None:
    assert trace_of(np.inf) is None
