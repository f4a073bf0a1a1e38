"""A comparison that fails for infinity which float16 made inside a kernel, and others that fail."""

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

SCALED = """
def scaled_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    square = tl.sum(x * x, axis=0) / BLOCK
    y = x * (1.0 / tl.sqrt(square.to(tl.float32) + 1e-5))
    tl.store(y_ptr + at, y.to(tl.float16))
"""
WIDE = SCALED.replace("tl.load(x_ptr + at)", "tl.load(x_ptr + at).to(tl.float32)")
#: Infinity that leads to nothing: the result hangs on numbers alone.
UNUSED = WIDE.replace(
    "    tl.store(",
    "    big = tl.load(x_ptr + at) * 1000.0\n    y = tl.where(big > 0, y, y)\n    tl.store(",
)
#: The same, where what is wrong was rounded in float16, and float32 mends that.
ROUNDED = SCALED.replace("square.to(tl.float32) + 1e-5", "tl.where(square > 0, 1.0, 1.0)").replace(
    "y = x * (", "y = x * 0.1 * 10.0 * ("
)
X = (100 * np.random.default_rng(0).standard_normal((4, 16))).astype(np.float16)
WANT = X.astype(np.float32) / np.sqrt((X.astype(np.float32) ** 2).mean(1, keepdims=True) + 1e-5)
#: What float16 makes of rows whose squares add up to more than it holds.
GAVE = np.where((X.astype(np.float32) ** 2).sum(1, keepdims=True) > 65504, 0, WANT).astype(
    np.float16
)


#: Of ROUNDED; what it wants is X.
SHORT = X * np.float16(0.1) * np.float16(10)


def examined(
    text: str = SCALED, gave: Array = GAVE, want: Array = WANT, **changes: Any
) -> Diagnosis:
    """Of a program whose one launch gave `gave`, where it wants `want`."""
    tensors = {"x_ptr": ("F16", (4, 16)), "y_ptr": ("F16", (4, 16))}
    launch = Launch(text, tensors, grid=(4,), constants={"BLOCK": 16}, held={"x_ptr": X})
    bundle = launch.bundle(gave={"y_ptr": gave})
    said = "`assert err < 0.05`"
    bundle = with_failed_comparison(bundle, gave, want, within=0.05, call=said, **changes)
    found = diagnose(bundle, allow_source=True)
    assert all(not rung.left_out for rung in found.rungs), found.rungs
    return found


def test_infinity_of_float16_that_the_result_hides_is_the_cause() -> None:
    [root] = examined().roots
    assert (root.cause, root.kernel, root.argument) == (Cause.NONFINITE_VALUE, "scaled", "x_ptr")
    assert (root.line, root.expression) == (4, "tl.load(x_ptr + at)")
    assert root.fix == "Compute in float32: `tl.load(x_ptr + at).to(tl.float32)`"
    [edit] = root.edits
    assert edit.new == "x = tl.load(x_ptr + at).to(tl.float32)"
    assert "`tl.sum(x * x, axis=0)` at scaled_kernel.py:5 gives inf of" in root.sentence
    assert "each of 64 elements satisfies the comparison" in root.proof.green


def test_a_sum_that_is_too_large_behind_squares_that_are_too_large_hides_nothing() -> None:
    """With another number for the squares the sum is infinite, and the root of what is left no
    number: each is put right before it is asked whether infinity led to what is wrong."""
    text = SCALED.replace("tl.sum(x * x, axis=0)", "tl.sum((x * 8) * (x * 8), axis=0) / 64")
    [root] = examined(text, gave=np.zeros_like(X)).roots
    assert (root.cause, root.argument, root.line) == (Cause.NONFINITE_VALUE, "x_ptr", 4)
    assert "`(x * 8) * (x * 8)` at scaled_kernel.py:5 gives inf of" in root.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"want": np.where(np.arange(64).reshape(4, 16) == 3, WANT + 1, WANT)},
        {"text": WIDE, "gave": WANT.astype(np.float16), "want": WANT + 1},
        {"text": UNUSED, "gave": WANT.astype(np.float16), "want": WANT + 1},
        {"gave": (GAVE + np.float16(1))},
        {"atol": None},
        {"is_first": False},
        {"shape": (64,), "index": (3,)},
    ],
    ids=[
        "one element is wrong in another way",
        "in float32 already",
        "infinity that nothing hangs on",
        "another wrote it",
        "no bound is known",
        "a mean is compared",
        "another view is compared",
    ],
)
def test_what_float32_does_not_put_right_has_no_cause(changes: dict[str, Any]) -> None:
    found = examined(**changes)
    assert found.roots == ()
    assert found.compared is not None
    assert not [h for h in found.hypotheses if h.diagnostic == "failed comparison"]


def test_infinity_beside_what_was_rounded_is_told_and_not_blamed() -> None:
    """With float32 all is as the program wants it, for another reason."""
    found = examined(ROUNDED, SHORT, X.astype(np.float32))
    assert found.roots == ()
    [seen] = [h for h in found.hypotheses if h.diagnostic == "failed comparison"]
    assert (seen.verdict, seen.cause) == (Verdict.INCONCLUSIVE, Cause.NONFINITE_VALUE)
    assert (seen.kernel, seen.argument) == ("scaled", "x_ptr")
    assert "some wrong elements do not hang on the infinity" in seen.evidence[1]
