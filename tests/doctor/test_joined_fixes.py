"""Fixes that belong together: a lane's number within its tile, at each access; and what the good
run says of both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.applied_fix import applied
from recorded.program_launch import Launch

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import RootCause, Verdict

#: Five heads in tiles of four: the second tile's lanes are compared as if they were the first's.
TEXT = """@triton.jit
def heads_kernel(q, out, H, D: tl.constexpr, W: tl.constexpr):
    tile = tl.program_id(0)
    h = tl.arange(0, W)
    at = tile * W * D + h[:, None] * D + tl.arange(0, D)[None, :]
    v = tl.load(q + at, mask=h[:, None] < H, other=0.0)
    tl.store(out + at, v, mask=h[:, None] < H)
"""
RIGHT = TEXT.replace("h[:, None] < H", "tile * W + h[:, None] < H")
HELD = {"q": np.arange(40, dtype=np.float32).reshape(5, 8), "out": np.zeros((5, 8), np.float32)}
BAD = Launch(
    TEXT, {"q": ("F32", (5, 8)), "out": ("F32", (5, 8))}, {"H": 5}, (2,), {"D": 8, "W": 4}, HELD
)


def root_of(good: Launch | None = None, gave: np.ndarray | None = None) -> RootCause:
    bundle = good.bundle({"out": gave}) if good is not None else None
    [root] = BAD.diagnosis(bundle).roots
    return root


def test_a_lane_is_compared_with_its_tile_at_each_access() -> None:
    root = root_of()
    assert (root.cause, root.argument, root.line) == (Cause.MISSING_MASK, "q", 6)
    assert "Compare `tile * W + h[:, None]" in root.fix
    assert {edit.line for edit in root.edits} == {6, 7}
    assert applied(BAD, root.edits).text == RIGHT


def test_a_tile_whose_lanes_are_compared_whole_has_no_finding() -> None:
    assert replace(BAD, text=RIGHT).diagnosis().is_clean


def test_of_joined_fixes_that_give_what_the_good_run_gave_the_report_says_so() -> None:
    root = root_of(replace(BAD, text=RIGHT), HELD["q"])
    assert {edit.line for edit in root.edits} == {6, 7}
    assert "what the good run gave" in root.proof.green


def test_joined_fixes_that_give_other_results_than_the_good_run_are_dropped() -> None:
    """Each alone leaves the other access outside, so of it alone the good run says nothing."""
    twice = replace(BAD, text=RIGHT.replace("at, v,", "at, 2.0 * v,"))
    found = BAD.diagnosis(twice.bundle({"out": 2 * HELD["q"]}))
    assert found.roots == ()
    told = [row for row in found.hypotheses if row.cause is Cause.ACCESS_OUTSIDE]
    assert [row.verdict for row in told] == [Verdict.INCONCLUSIVE] * 2
    assert all("and gives what the good run gave" in row.evidence[-1] for row in told)


#: Both accesses of one line lack the rows' mask.
ONE_LINE = """@triton.jit
def scale_kernel(x, out, M, N, R: tl.constexpr, C: tl.constexpr):
    r = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.arange(0, C)
    at = r[:, None] * N + c[None, :]
    m = c[None, :] < N
    tl.store(out + at, tl.load(x + at, mask=m) * 2, mask=m)
"""


def test_one_change_of_two_accesses_of_a_line_is_told_once() -> None:
    tensors = {"x": ("F32", (5, 7)), "out": ("F32", (5, 7))}
    launch = Launch(ONE_LINE, tensors, {"M": 5, "N": 7}, (2,), {"R": 4, "C": 8})
    [root] = launch.diagnosis().roots
    change = "`r[:, None] < M` in the mask of line 7"
    assert root.fix.endswith("as well, at each access of line 7")
    assert root.proof.corrected == f"{change}, at each access of it"
    assert f"the same replay with {change}, at each access of it: no such" in root.proof.green
