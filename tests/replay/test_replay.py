"""Replays of right and wrong launches: each fault is found with lane, element and line."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from specimens import replay_kernels as kernels  # noqa: E402

from hypocenter.base.errors import UsageError  # noqa: E402
from hypocenter.replay import replay as replay_module  # noqa: E402
from hypocenter.replay.findings import Finding, ReplayReport  # noqa: E402
from hypocenter.replay.replay import (  # noqa: E402
    KernelFailed,
    ProgramNeverEnds,
    ProgramTooSlow,
    VirtualTensor,
    replay,
)
from hypocenter.replay.terms import GivenMemory, Schedule  # noqa: E402
from hypocenter.replay.text import finding_text, headroom_text  # noqa: E402


def check(kernel: Any, grid: Any, /, **arguments: Any) -> ReplayReport:
    def taken(*names: str) -> dict[str, Any]:
        return {name: arguments.pop(name) for name in names if name in arguments}

    schedule = Schedule(**taken("programs", "budget_seconds", "first"))
    given = GivenMemory(**taken("undefined", "outputs"))
    headroom = arguments.pop("headroom", False)
    return replay(kernel, grid, arguments, schedule=schedule, given=given, headroom=headroom)


def only(report: ReplayReport) -> Finding:
    assert len(report.findings) == 1, report.findings
    return report.findings[0]


def rows(num_rows: int = 5, num_cols: int = 100) -> dict[str, Any]:
    return {
        "x_ptr": torch.randn(num_rows, num_cols), "y_ptr": torch.empty(num_rows, num_cols),
        "x_stride": num_cols, "y_stride": num_cols, "n_cols": num_cols, "BLOCK": 128,
        "undefined": ["y_ptr"], "outputs": ["y_ptr"],
    }  # fmt: skip


# -- right launches -------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 1), (3, 127), (5, 128), (1, 100)])
def test_a_right_launch_has_no_finding_and_the_right_result(num_rows: int, num_cols: int) -> None:
    launch = rows(num_rows, num_cols)
    report = check(kernels.scaled_rows, (num_rows,), **launch)
    assert report.findings == ()
    assert torch.equal(launch["y_ptr"], launch["x_ptr"] * 2)
    assert report.coverage.is_complete
    assert report.coverage.num_lanes == 2 * num_rows * num_cols


def test_a_strided_view_is_indexed_as_the_tensor_it_is() -> None:
    whole = torch.randn(8, 200)
    launch = rows(4, 100) | {"x_ptr": whole[2:6, 50:150], "x_stride": 200}
    assert check(kernels.scaled_rows, (4,), **launch).findings == ()
    assert torch.equal(launch["y_ptr"], whole[2:6, 50:150] * 2)


def test_atomics_do_not_race_and_count_right() -> None:
    x = torch.randint(0, 8, (100,), dtype=torch.int32)
    bins = torch.zeros(8, dtype=torch.int32)
    report = check(kernels.histogram, 4, x_ptr=x, bins_ptr=bins, n=100, BLOCK=32, ATOMIC=True)
    assert report.findings == ()
    assert torch.equal(bins.long(), torch.bincount(x, minlength=8))


def test_a_lock_orders_programs() -> None:
    x, total = torch.randn(4, 16), torch.zeros(16)
    lock = torch.zeros(1, dtype=torch.int32)
    launch = {"x_ptr": x, "sum_ptr": total, "lock_ptr": lock, "BLOCK": 16}
    assert check(kernels.locked_sum, 4, **launch, LOCKED=True).findings == ()
    assert torch.allclose(total, x.sum(0), rtol=0, atol=1e-6 * float(x.abs().sum()))
    kinds = {
        finding.kind for finding in check(kernels.locked_sum, 4, **launch, LOCKED=False).findings
    }
    assert kinds == {"race"}


def test_a_counter_orders_programs() -> None:
    x = torch.randn(8, 16)
    y, count = torch.empty(1), torch.zeros(1, dtype=torch.int32)
    report = check(
        kernels.last_one_sums, 8, x_ptr=x, part_ptr=torch.empty(8), y_ptr=y, count_ptr=count,
        BLOCK=16, PARTS=8, undefined=["part_ptr", "y_ptr"], outputs=["part_ptr", "y_ptr"],
    )  # fmt: skip
    assert report.findings == ()
    # The order of additions differs, and the sum may be near zero where its parts are not.
    assert torch.allclose(y, x.sum(), rtol=0, atol=1e-6 * float(x.abs().sum()))


def test_arithmetic_that_is_meant_to_wrap_is_none_of_our_business() -> None:
    assert (
        check(kernels.hashed, 1, y_ptr=torch.zeros(64, dtype=torch.int32), BLOCK=64).findings == ()
    )


@pytest.mark.parametrize("num_rows", [16, 13])
def test_descriptors_are_followed(num_rows: int) -> None:
    x, y = torch.randn(num_rows, 16), torch.empty(16, 16)
    launch = {"desc_ptr": x, "y_ptr": y, "rows": num_rows, "cols": 16, "M": 8, "N": 16}
    report = check(kernels.tile, 2, **launch, undefined=["y_ptr"], outputs=["y_ptr"])
    assert report.findings == ()
    assert torch.equal(y[:num_rows], x)
    assert not y[num_rows:].any()


# -- wrong launches -------------------------------------------------------------------------------


def test_out_of_bounds_names_lane_element_values_and_line() -> None:
    launch = rows() | {"x_ptr": torch.randn(5, 90).reshape(-1), "x_stride": 100}
    finding = only(check(kernels.scaled_rows, 5, **launch))
    assert (finding.kind, finding.operation, finding.argument) == ("out of bounds", "load", "x_ptr")
    assert finding.program == (4, 0, 0)
    assert finding.lane == (50,)
    assert finding.num_lanes == 50
    assert finding.values["row"] == 4
    assert finding.values["cols"] == 50
    assert finding.values["x_stride"] == 100
    assert "element 450" in finding.detail
    assert (finding.number, finding.element) == (450, None)
    assert finding.sites[0].expression.startswith("tl.load(x_ptr + row * x_stride + cols")
    assert finding.sites[0].function == "scaled_rows"
    text = Path(finding.sites[0].file).read_text().splitlines()[finding.sites[0].line - 1]
    assert "tl.load(x_ptr + row * x_stride" in text


def test_a_store_out_of_bounds_changes_nothing_outside() -> None:
    whole = torch.zeros(64)
    report = check(
        kernels.unmasked, 1, x_ptr=torch.ones(32), y_ptr=whole[:20], BLOCK=32, outputs=["y_ptr"]
    )
    finding = only(report)
    assert (finding.kind, finding.operation, finding.num_lanes) == ("out of bounds", "store", 12)
    assert whole.tolist() == [1.0] * 20 + [0.0] * 44


def test_a_missing_mask_is_found_in_the_last_block() -> None:
    report = check(kernels.unmasked, 4, x_ptr=torch.zeros(100), y_ptr=torch.zeros(100), BLOCK=32)
    assert {(f.operation, f.program, f.lane) for f in report.findings} == {
        ("load", (3, 0, 0), (4,)), ("store", (3, 0, 0), (4,)),
    }  # fmt: skip


def test_a_null_pointer_is_named_so() -> None:
    finding = only(
        check(kernels.through_nothing, 1, x_ptr=torch.zeros(8), y_ptr=torch.zeros(8), BLOCK=8)
    )
    assert (finding.kind, finding.argument, finding.num_lanes) == ("null pointer", None, 8)


def test_none_and_an_empty_tensor_are_null_pointers() -> None:
    launch = {"x_ptr": torch.zeros(8), "y_ptr": torch.zeros(8), "BLOCK": 8}
    assert check(kernels.biased, 1, **launch, bias_ptr=None, HAS_BIAS=False).findings == ()
    finding = only(check(kernels.biased, 1, **launch, bias_ptr=None, HAS_BIAS=True))
    assert (finding.kind, finding.sites[0].expression) == ("null pointer", "bias_ptr + offs")
    finding = only(check(kernels.biased, 1, **launch, bias_ptr=torch.zeros(0), HAS_BIAS=True))
    assert (finding.kind, finding.argument, finding.num_lanes) == ("null pointer", "bias_ptr", 8)


def test_an_uninitialised_read_is_found() -> None:
    launch = {"x_ptr": torch.ones(100), "y_ptr": torch.empty(100), "n": 100, "BLOCK": 32}
    finding = only(check(kernels.accumulate, 4, **launch, undefined=["y_ptr"], outputs=["y_ptr"]))
    assert (finding.kind, finding.argument, finding.element) == (
        "uninitialised read",
        "y_ptr",
        (0,),
    )
    assert finding.num_lanes == 100
    assert check(kernels.accumulate, 4, **launch).findings == ()


def test_programs_that_write_one_place_race() -> None:
    launch = rows() | {"y_stride": 99}
    kinds = {str(f.kind): f for f in check(kernels.scaled_rows, 5, **launch).findings}
    assert kinds.keys() == {"race", "never written"}
    assert kinds["race"].program == (1, 0, 0)
    assert kinds["race"].element == (0, 99)
    assert "program (0, 0, 0) wrote" in kinds["race"].detail
    assert kinds["never written"].element == (4, 96)
    assert kinds["never written"].num_lanes == 4


def test_a_read_of_what_another_program_writes_is_a_race() -> None:
    x = torch.randint(0, 8, (100,), dtype=torch.int32)
    bins = torch.zeros(8, dtype=torch.int32)
    report = check(kernels.histogram, 4, x_ptr=x, bins_ptr=bins, n=100, BLOCK=32, ATOMIC=False)
    race = only(report)  # read and written back: one race and not two
    assert (race.kind, race.operation) == ("race", "load")
    assert "; and writes it in line " in race.detail
    finding = only(check(kernels.shift_in_place, 4, x_ptr=torch.randn(100), n=100, BLOCK=32))
    assert (finding.operation, finding.element) == ("store", (32,))
    assert "program (0, 0, 0) read" in finding.detail


def test_a_lane_that_reads_and_writes_what_others_do_counts_once() -> None:
    finding = only(check(kernels.count_up, 4, x_ptr=torch.zeros(1, dtype=torch.int32)))
    assert (finding.num_lanes, finding.num_programs) == (3, 3)
    x, y = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    stored = only(check(kernels.store_and_look, 4, x_ptr=x, y_ptr=y))
    assert (stored.num_lanes, stored.num_programs) == (3, 3)


def test_a_race_between_two_views_of_one_tensor_is_seen() -> None:
    x = torch.randn(101)
    report = check(kernels.unmasked, 4, x_ptr=x[1:97], y_ptr=x[:96], BLOCK=32)
    assert {finding.kind for finding in report.findings} >= {"race"}


def test_lanes_of_one_store_race_when_they_disagree() -> None:
    y = torch.zeros(8, dtype=torch.int32)
    finding = only(check(kernels.scatter_one_store, 1, y_ptr=y, BLOCK=16, EQUAL=False))
    assert finding.kind == "race"
    assert "two lanes" in finding.detail
    assert check(kernels.scatter_one_store, 1, y_ptr=y, BLOCK=16, EQUAL=True).findings == ()


def test_a_grid_too_small_leaves_output_unwritten() -> None:
    finding = only(check(kernels.scaled_rows, 4, **rows()))
    assert (finding.kind, finding.argument, finding.element) == ("never written", "y_ptr", (4, 0))
    assert finding.num_lanes == 100


def test_a_descriptor_larger_than_its_tensor_is_found() -> None:
    launch = {"desc_ptr": torch.randn(13, 16), "y_ptr": torch.empty(16, 16), "rows": 16, "cols": 16}
    finding = only(check(kernels.tile, 2, **launch, M=8, N=16))
    assert (finding.kind, finding.argument, finding.lane) == ("out of bounds", "desc_ptr", (5, 0))
    assert finding.sites[0].expression.startswith("desc.load(")


def test_a_host_descriptor_is_followed() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, y = torch.randn(16, 16), torch.empty(16, 16)
    launch = {"y_ptr": y, "M": 8, "N": 16}
    right = TensorDescriptor.from_tensor(x, [8, 16])
    assert check(kernels.host_tile, 2, desc=right, **launch).findings == ()
    assert torch.equal(x, y)
    wrong = TensorDescriptor(x[:13], [16, 16], [16, 1], [8, 16])
    finding = only(check(kernels.host_tile, 2, desc=wrong, **launch))
    assert (finding.kind, finding.argument) == ("out of bounds", "desc")


def test_block_pointers_are_followed() -> None:
    x, y = torch.randn(13, 16), torch.empty(13, 16)
    launch = {"x_ptr": x, "y_ptr": y, "M": 8, "N": 16, "undefined": ["y_ptr"], "outputs": ["y_ptr"]}
    assert check(kernels.block_tile, 2, **launch, rows=13).findings == ()
    assert torch.equal(x, y)
    found = check(kernels.block_tile, 2, **launch, rows=16).findings
    assert {(f.kind, f.operation, f.lane) for f in found} == {
        ("out of bounds", "load", (5, 0)), ("out of bounds", "store", (5, 0)),
    }  # fmt: skip


def test_an_assertion_is_a_finding_and_the_other_programs_still_run() -> None:
    x, y = torch.randn(16, 16), torch.empty(16, 16)
    launch = {"desc_ptr": x.reshape(-1)[1:], "y_ptr": y, "rows": 15, "cols": 16, "M": 8, "N": 16}
    report = check(kernels.tile, 2, **launch)
    finding = only(report)
    assert (finding.kind, finding.num_programs) == ("assertion", 2)
    assert finding.detail == "base must be 16-byte aligned"
    assert report.coverage.is_complete


@pytest.mark.parametrize("grid", [(1, 70000), (2**31,), (-1,)])
def test_a_grid_beyond_the_limits_is_a_finding(grid: tuple[int, ...]) -> None:
    assert only(check(kernels.scaled_rows, grid, **rows())).kind == "bad grid"


# -- offsets that leave int32 ---------------------------------------------------------------------


def virtual_rows(num_rows: int, stride: int) -> Mapping[str, Any]:
    tensor = VirtualTensor("float16", (num_rows, stride), (stride, 1))
    return {
        "x_ptr": tensor, "y_ptr": tensor, "x_stride": stride, "y_stride": stride,
        "n_cols": 8, "BLOCK": 8,
    }  # fmt: skip


@pytest.mark.parametrize("stride", [100_000, 65_536, 1_000_003])
def test_the_first_program_that_overflows_is_exact(stride: int) -> None:
    first = -(-(2**31) // stride)  # the least row with row * stride > 2**31 - 1
    num_rows = first + 5
    report = check(
        kernels.scaled_rows, num_rows, **virtual_rows(num_rows, stride),
        programs=[0, first - 1, first, num_rows - 1],
    )  # fmt: skip
    assert {(f.kind, f.operation) for f in report.findings} == {
        ("int32 overflow", "load"), ("int32 overflow", "store"),
    }  # fmt: skip
    for finding in report.findings:
        assert finding.program == (first, 0, 0)
        assert (finding.axis, finding.threshold) == (0, first)
        assert finding.origin is not None
        assert "row * " in finding.origin.expression
    fewer = check(
        kernels.scaled_rows, first, **virtual_rows(first, stride), programs=[0, first - 1],
        headroom=True,
    )  # fmt: skip
    assert fewer.findings == ()
    assert [(spare.axis, spare.threshold) for spare in fewer.headroom] == [(0, first)]
    assert fewer.headroom[0].num_programs == first


def test_a_search_for_headroom_that_had_no_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypocenter.replay.replay.HEADROOM_SECONDS", 0.0)
    report = check(kernels.scaled_rows, 10, **virtual_rows(10, 8), headroom=True)
    assert report.findings == ()
    assert [(spare.axis, spare.threshold, spare.gave_up) for spare in report.headroom] == [
        (axis, None, "after 0 s") for axis in range(3)
    ]
    text = headroom_text(report.headroom[0])
    assert text == "scaled_rows: not searched to the end along x: after 0 s"


def test_an_overflow_is_told_along_the_axes_that_the_grid_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No probe along x ends here, and along y the one program there is none to begin with."""
    monkeypatch.setattr("hypocenter.replay.headroom._SPARE_STEPS", 5_000)  # they take seconds
    tensor = VirtualTensor("int8", (3 << 30,), (1,))
    report = check(kernels.counted_rows, 3, x_ptr=tensor, stride=1 << 30)
    finding = only(report)
    assert (finding.kind, finding.program) == ("int32 overflow", (2, 0, 0))
    assert (finding.axis, finding.threshold) == (None, None)
    assert "from program" not in finding_text(finding)


def test_a_wrapped_number_is_followed_through_a_division() -> None:
    tensor = VirtualTensor("int8", (3, 1 << 30), (1 << 30, 1))
    launch = {"x_ptr": tensor, "y_ptr": tensor, "n_cols": 1 << 30, "stride": 1 << 30}
    first = 2**31 // 1024
    report = check(kernels.flattened, first + 1, **launch, BLOCK=1024, programs=[first - 1, first])
    assert {(f.kind, f.program, f.threshold) for f in report.findings} == {
        ("int32 overflow", (first, 0, 0), first)
    }


def test_a_finding_shows_its_lowest_program_whichever_is_run_first() -> None:
    launch = virtual_rows(40_000, 2**30)
    found = [
        check(kernels.scaled_rows, 4, **launch, first=first).findings
        for first in ((3,), (), (2, 3))
    ]
    assert found[0] == found[1] == found[2]
    assert {finding.program for finding in found[0]} == {(2, 0, 0)}


def test_sixty_four_bit_offsets_do_not_overflow() -> None:
    report = check(
        kernels.scaled_rows_wide, 40_000, **virtual_rows(40_000, 100_000), programs=[0, 39_999],
        headroom=True,
    )  # fmt: skip
    assert report.findings == ()
    assert report.headroom == ()


def test_virtual_tensors_are_checked_for_bounds() -> None:
    launch = dict(virtual_rows(40_000, 100_000))
    launch["x_ptr"] = VirtualTensor("float16", (39_999, 100_000), (100_000, 1))
    report = check(kernels.scaled_rows_wide, 40_000, **launch, programs=[39_998, 39_999])
    assert only(report).program == (39_999, 0, 0)


# -- what it takes --------------------------------------------------------------------------------


def test_only_the_programs_asked_for_are_run() -> None:
    launch = rows()
    launch["y_ptr"].fill_(-1)
    del launch["undefined"]
    report = check(kernels.scaled_rows, 5, **launch, programs=[1, 3])
    assert (report.coverage.num_run, report.coverage.num_launched) == (2, 5)
    assert report.findings == ()  # nobody can say what the other programs write
    assert (launch["y_ptr"] == -1).all(1).tolist() == [True, False, True, False, True]


def test_a_budget_samples_and_takes_the_last_program() -> None:
    launch = rows(4000, 8) | {"BLOCK": 8, "x_ptr": torch.randn(3999, 8)}
    report = check(kernels.scaled_rows, 4000, **launch, budget_seconds=0.05)
    assert 0 < report.coverage.num_run < 4000
    assert only(report).program == (3999, 0, 0)
    assert report.coverage.seconds < 2


def test_a_grid_may_be_a_function() -> None:
    launch = rows()
    report = check(kernels.scaled_rows, lambda meta: (meta["x_ptr"].shape[0],), **launch)
    assert report.coverage.num_launched == 5
    assert report.findings == ()


def test_a_kernel_that_cannot_run_says_where() -> None:
    with pytest.raises(KernelFailed, match=r"replay_kernels\.py:\d+ .*no_such_function"):
        check(kernels.fails, 1, x_ptr=torch.zeros(1))


def test_a_slow_program_is_told_from_one_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "PROGRAM_SECONDS", 0.1)
    with pytest.raises(ProgramTooSlow, match=r"is too slow here: .* still gets on$") as told:
        check(kernels.counts_up, 1, x_ptr=torch.zeros(1, dtype=torch.int32), n=10**7)
    assert told.value.site is None  # no line of it is to blame


def test_a_loop_that_touches_no_memory_is_seen_to_go_in_circles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_module, "PROGRAM_SECONDS", 0.4)
    steps = {"steps_ptr": torch.tensor([4, 0], dtype=torch.int32), "out_ptr": torch.zeros(2)}
    assert check(kernels.walks_to_an_end, 1, **steps, end=10**3).coverage.is_complete
    with pytest.raises(ProgramNeverEnds, match="to the same line with the same values") as told:
        check(kernels.walks_to_an_end, 2, **steps, end=10**3)
    assert told.value.site is not None
    slow = {**steps, "steps_ptr": torch.ones(1, dtype=torch.int32)}
    with pytest.raises(ProgramTooSlow, match="still gets on"):
        check(kernels.walks_to_an_end, 1, **slow, end=10**8)


def test_a_scan_of_zeros_goes_in_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its helper is called with the same values again and again, and it ends."""
    monkeypatch.setattr(replay_module, "PROGRAM_SECONDS", 0.2)
    out = {"out_ptr": torch.zeros(1 << 15, dtype=torch.int32)}
    with pytest.raises(ProgramTooSlow, match="still gets on"):
        check(kernels.scans_for_long, 1, **out, BLOCK=1 << 15)


def test_time_that_others_had_of_the_processor_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(0, 1000)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    x = torch.zeros(1, dtype=torch.int32)
    assert check(kernels.counts_up, 1, x_ptr=x, n=2000).coverage.is_complete
    assert check(kernels.counts_up, 3, x_ptr=x, n=2, budget_seconds=60.0).coverage.is_complete
    assert x.item() == 2006


@pytest.mark.parametrize(
    ("change", "message"),
    [({"n_cols": None, "no_such": 1}, ""), ({"x_ptr": torch.zeros(1, device="meta")}, "on meta")],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    launch = rows() | change
    if "no_such" in change:
        del launch["n_cols"]
        message = "n_cols"
    with pytest.raises(UsageError, match=message):
        check(kernels.scaled_rows, 5, **launch)


def test_something_else_than_a_kernel_is_refused() -> None:
    with pytest.raises(UsageError, match="got function"):
        replay(check, 1, {})
