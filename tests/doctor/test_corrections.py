"""Common mistakes of kernels: each correction is right in all that it says, or nothing is said.

Fixes are applied to the text or to the launch: what is left has no cause.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from recorded.applied_fix import applied
from recorded.common_mistakes import CASES, TWINS, UNDECIDED, is_false
from recorded.program_launch import Launch
from recorded.soundness_checks import CHECKS

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.rungs.replaying.joining import merged_lines


@pytest.mark.parametrize("name", CASES)
def test_the_correction_is_whole_and_leaves_nothing(name: str) -> None:
    expected = CASES[name]
    roots = expected.launch.diagnosis().roots
    assert [(root.cause, root.argument, root.line) for root in roots] == [
        (expected.cause, expected.argument, expected.line)
    ]
    assert roots[0].fix.startswith(expected.fix)
    assert bool(roots[0].beside) is expected.has_more
    assert len(roots[0].alternatives) == expected.num_alternatives
    if expected.is_applied and not expected.num_alternatives:
        assert not applied(expected.launch, roots[0].edits).diagnosis().roots


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_has_no_cause(name: str) -> None:
    assert not TWINS[name].diagnosis().roots


@pytest.mark.parametrize("name", UNDECIDED)
def test_a_race_that_something_else_may_make_is_told_as_no_root(name: str) -> None:
    """The race is seen, and does not say what the programs were meant to write."""
    found = UNDECIDED[name].diagnosis()
    assert not found.roots
    assert any(
        one.cause is Cause.PROGRAM_RACE and one.verdict == "INCONCLUSIVE"
        for one in found.hypotheses
    )


@pytest.mark.tier("lab")
@pytest.mark.parametrize("name", CHECKS)
def test_without_a_check_of_soundness_a_claim_is_false(name: str) -> None:
    check = CHECKS[name]
    launch = CASES[check.witness].launch if check.witness in CASES else UNDECIDED[check.witness]
    with check.taken_away():
        roots = launch.diagnosis().roots
    assert any(is_false(root, CASES.get(check.witness)) for root in roots)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("a(x, m)\nb(y)\n", "a(x)\nb(y, m)\n", "a(x, m)\nb(y, m)\n"),
        ("a(x, m) + b(y)\n", "a(x) + b(y, m)\n", "a(x, m) + b(y, m)\n"),
        ("a(x, m)\n", "a(x, m)\n", "a(x, m)\n"),
        ("a(x, m)\n", "a(x, k)\n", None),
        ("a(x)\nb\n", "a(x, m)\n", None),
    ],
)
def test_changes_of_two_places_are_joined(one: str, other: str, both: str | None) -> None:
    base = "".join(
        line.replace(", m", "").replace(", k", "") for line in other.splitlines(keepends=True)
    )
    assert merged_lines(base, one, other) == both


#: Rows by an index, in a table of 64 columns that is said to have more.
ROWS = """
def rows_kernel(x_ptr, ids_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + tl.program_id(0))
    tl.store(out_ptr + tl.program_id(0) * BLOCK + c, tl.load(x_ptr + row * stride + c))
"""


def test_an_offset_that_64_bits_put_outside_as_well_is_no_overflow() -> None:
    """The stride is the fault; the product leaves 32 bits because of it."""
    launch = Launch(
        ROWS,
        {"x_ptr": ("F32", (30_000, 8)), "ids_ptr": ("I32", (3,)), "out_ptr": ("F32", (3, 8))},
        {"stride": 100_000},
        grid=(3,),
        constants={"BLOCK": 8},
        held={"ids_ptr": np.array([5, 29_999, 17], np.int32)},
    )
    found = launch.diagnosis()
    [root] = found.roots
    assert root.cause is Cause.WRONG_STRIDE
    assert root.argument == "stride"
    assert "64 bits" not in root.fix
