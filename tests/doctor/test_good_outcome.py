"""A correction gives what the good run gave, or it is none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.program_launch import Launch

from hypocenter.doctor.causes import Cause

#: Each program sums 64 numbers from its row of 50 on: its row alone may be meant, or all of them.
TEXT = """@triton.jit
def window_kernel(x, o, n, size, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    i = r * n + c
    tl.store(o + r, tl.sum(tl.load(x + i)))
"""
HELD = {"x": np.arange(400, dtype=np.float32).reshape(8, 50), "o": np.zeros(8, np.float32)}
BAD = Launch(
    TEXT, {"x": ("F32", (8, 50)), "o": ("F32", (8,))}, {"n": 50, "size": 400}, (8,),
    {"BLOCK": 64}, HELD,
)  # fmt: skip
FLAT = HELD["x"].reshape(-1)
ROWS = HELD["x"].sum(axis=1)
WINDOWS = np.array([FLAT[50 * r : 50 * r + 64].sum() for r in range(8)], np.float32)
OF_ROWS, OF_WINDOWS = "mask=c < n, other=0.0", "mask=i < size, other=0.0"


def good(mask: str) -> Launch:
    return replace(BAD, text=TEXT.replace("tl.load(x + i)", f"tl.load(x + i, {mask})"))


def first_fix(good_run: Launch | None, gave: np.ndarray | None = None) -> tuple[str, str]:
    """What is told first, and its replay."""
    bundle = good_run.bundle({"o": gave}) if good_run is not None else None
    [root] = BAD.diagnosis(bundle).roots
    assert (root.argument, root.line) == ("x", 6)
    return root.fix, root.proof.green


def test_of_two_masks_that_fit_the_good_run_says_which_is_meant() -> None:
    fix, green = first_fix(None)
    assert (fix, "the good run" in green) == ("Mask the access with `i < size`", False)
    fix, green = first_fix(good(OF_WINDOWS), WINDOWS)
    assert (fix, "what the good run gave" in green) == ("Mask the access with `i < size`", True)
    fix, green = first_fix(good(OF_ROWS), ROWS)
    assert (fix, "what the good run gave" in green) == ("Mask the access with `c < n`", True)


def test_where_no_correction_gives_what_the_good_run_gave_none_is_told() -> None:
    text = good(OF_ROWS).text.replace("tl.sum(", "2.0 * tl.sum(")
    bundle = replace(BAD, text=text).bundle({"o": 2 * ROWS})
    [root] = BAD.diagnosis(bundle).roots
    assert root.cause is Cause.ACCESS_OUTSIDE
    assert root.edits == ()
    assert "no one change that was tried" in root.fix


@pytest.mark.parametrize("what", ["other inputs", "a replay that gives something else"])
def test_results_that_say_nothing_of_this_launch_refute_nothing(what: str) -> None:
    fix, green = first_fix(None)
    run, gave = good(OF_ROWS), ROWS
    if what == "other inputs":
        run = replace(run, held={**HELD, "x": HELD["x"] + 1})
        gave = ROWS + 50
    else:
        gave = 2 * ROWS
    assert first_fix(run, gave) == (fix, green)
