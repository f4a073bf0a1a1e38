"""Lanes that meet without a barrier, lanes without a value, and programs that wait."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specimens import replay_kernels as kernels  # noqa: E402

from hypocenter.replay import replay as replay_module  # noqa: E402
from hypocenter.replay.findings import ReplayReport  # noqa: E402
from hypocenter.replay.replay import ProgramNeverEnds, replay  # noqa: E402
from hypocenter.replay.terms import Schedule  # noqa: E402


def check(kernel: Any, grid: Any, **arguments: Any) -> ReplayReport:
    schedule = Schedule(num_warps=arguments.pop("num_warps", None))
    headroom = arguments.pop("headroom", False)
    return replay(kernel, grid, arguments, schedule=schedule, headroom=headroom)


# -- lanes that meet ------------------------------------------------------------------------------


def back(*, barrier: bool, num_warps: int = 4) -> ReplayReport:
    arguments = {"x_ptr": torch.zeros(64), "y_ptr": torch.zeros(64), "BARRIER": barrier}
    return check(kernels.back_by_others, 1, **arguments, BLOCK=64, num_warps=num_warps)


def test_what_another_lane_stored_is_read_behind_a_barrier_alone() -> None:
    (finding,) = back(barrier=False).findings
    assert (finding.kind, finding.operation, finding.argument) == ("race", "load", "x_ptr")
    assert finding.is_of_lanes
    assert (finding.lane, finding.element, finding.num_lanes) == ((0,), (63,), 64)
    assert "another lane of this program has stored, with no barrier between" in finding.detail
    assert back(barrier=True).findings == ()
    assert back(barrier=False, num_warps=1).findings == ()  # its lanes go in step


@pytest.mark.parametrize(
    ("shift", "same", "found"),
    [(4, False, True), (4, True, False), (64, False, False), (0, False, False)],
)
def test_two_stores_lose_an_update_where_they_overlap(shift: int, same: bool, found: bool) -> None:
    x = torch.ones(128)
    report = check(kernels.adds_around, 1, x_ptr=x, SHIFT=shift, SAME=same, BLOCK=64)
    told = [(f.operation, f.is_of_lanes, f.num_lanes) for f in report.findings]
    assert told == ([("store", True, 60)] if found else [])


# -- lanes without a value ------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "reached"), [
    ("sum", "the value in line"), ("where", ""), ("same mask", ""),
    ("other mask", "the value in line"), ("branch", "the condition in line"),
    ("address", "the address in line"), ("mask", "the mask in line"), ("narrowed mask", ""),
    ("cumsum", ""), ("reversed cumsum", "the value in line"),
])  # fmt: skip
@pytest.mark.parametrize("n", [5, 8])
def test_a_lane_that_a_load_leaves_out_is_told_where_it_matters(
    how: str, reached: str, n: int
) -> None:
    launch = {"x_ptr": torch.ones(n), "out_ptr": torch.zeros(n + 1), "n": n, "HOW": how}
    report = check(kernels.sums_left_out, 1, **launch, BLOCK=8)
    if n == 8 or not reached:  # nothing is left out, or nothing of it matters
        assert report.findings == ()
        return
    (finding,) = report.findings
    assert (finding.kind, finding.operation) == ("undefined lane", "load")
    assert (finding.argument, finding.lane) == ("x_ptr", (5,))
    assert finding.values["at"] == 5
    assert finding.sites[0].expression == "tl.load(x_ptr + at, mask=mask)"
    assert reached in finding.detail


@pytest.mark.parametrize("both", [True, False])
def test_a_row_that_is_left_out_whole_is_not_its_neighbours(both: bool) -> None:
    launch = {"x_ptr": torch.ones(64), "out_ptr": torch.zeros(8), "m": 5, "n": 6, "BOTH": both}
    report = check(kernels.rows_left_out, 1, **launch, BLOCK=8)
    assert [finding.kind for finding in report.findings] == (["undefined lane"] if both else [])


@pytest.mark.parametrize("other", [True, False])
def test_a_scalar_that_is_given_a_zero_has_a_value(other: bool) -> None:
    launch = {"x_ptr": torch.ones(4), "out_ptr": torch.zeros(1), "at": -100, "OTHER": other}
    report = check(kernels.scalar_left_out, 1, **launch)
    assert [finding.kind for finding in report.findings] == ([] if other else ["undefined lane"])


# -- programs that wait ---------------------------------------------------------------------------


def phases(expected: int) -> tuple[ReplayReport, bool]:
    x, out = torch.arange(64.0), torch.empty(64)
    report = check(
        kernels.two_phases, 4, x_ptr=x, y_ptr=torch.empty(64), out_ptr=out,
        count_ptr=torch.zeros(1, dtype=torch.int32), expected=expected, BLOCK=16, headroom=True,
    )  # fmt: skip
    return report, torch.equal(out, (x * 2).roll(-16))


def test_programs_that_wait_for_each_other_have_turns() -> None:
    report, is_right = phases(4)
    assert report.findings == ()
    assert report.coverage.is_complete
    assert is_right


def test_programs_that_wait_for_one_too_many_wait_for_ever() -> None:
    before = threading.active_count()
    report, _ = phases(5)
    (finding,) = report.findings
    assert (finding.kind, finding.argument, finding.element) == (
        "waits for ever",
        "count_ptr",
        (0,),
    )
    assert "no program is left that does it: 0 have ended, and 4 wait" in finding.detail
    assert finding.sites[0].expression == "tl.atomic_add(count_ptr, 0)"
    assert (report.coverage.num_run, report.coverage.num_waiting) == (0, 4)
    assert threading.active_count() == before


def test_a_program_may_wait_for_a_later_one() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    report = check(kernels.waits_for_a_later_one, 2, flag_ptr=flag)
    assert report.findings == ()
    assert report.coverage.is_complete


def test_a_word_that_no_program_changes_may_be_somebody_elses() -> None:
    before = threading.active_count()
    with pytest.raises(ProgramNeverEnds, match="another launch or the host may") as told:
        check(kernels.waits_for_nobody, 3, flag_ptr=torch.zeros(1, dtype=torch.int32))
    assert told.value.site is not None
    assert threading.active_count() == before


def test_a_loop_that_counts_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "PROGRAM_SECONDS", 30.0)
    out = torch.zeros(1)
    report = check(kernels.reads_one_word_often, 2, x_ptr=torch.ones(1), out_ptr=out, n=300)
    assert report.coverage.is_complete
    assert {finding.kind for finding in report.findings} == {"race"}  # both store the sum
    assert out.item() == 300


@pytest.mark.parametrize(("value", "is_race"), [(1, False), (0, True), (2, True)])
def test_a_flag_that_several_programs_raise_is_no_race(value: int, is_race: bool) -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    report = check(kernels.raises_flag, (4,), flag_ptr=flag, VALUE=value)
    assert [finding.kind for finding in report.findings] == ["race"] * is_race
