"""How many lanes, programs and elements a finding tells of: held against a count one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from recorded.program_launch import Launch  # noqa: E402
from specimens import replay_kernels as kernels  # noqa: E402

from hypocenter.doctor.diagnosis import Verdict  # noqa: E402
from hypocenter.replay.findings import FindingKind, ReplayReport  # noqa: E402
from hypocenter.replay.replay import replay  # noqa: E402
from hypocenter.replay.terms import GivenMemory  # noqa: E402
from hypocenter.replay.text import finding_text  # noqa: E402

#: Kinds of what lies outside of a tensor.
OUTSIDE = (FindingKind.OUT_OF_BOUNDS, FindingKind.BETWEEN_ROWS)


def lanes_outside(report: ReplayReport, operation: str) -> int:
    return sum(
        found.num_lanes
        for found in report.findings
        if found.kind in OUTSIDE and found.operation == operation
    )


@pytest.mark.tier("sim", fast=lambda case: case.seed < 12)
@pytest.mark.parametrize("seed", range(40))
def test_lanes_and_programs_of_a_row_are_counted_one_by_one(seed: int) -> None:
    """Masks end early, late or rightly; blocks are larger and smaller than what is left."""
    draw = random.Random(seed)
    block = draw.choice((1, 2, 16, 64, 128, 256))
    num, num_out = draw.randrange(1, 400), draw.randrange(1, 400)
    end_load, end_store = (max(0, size + draw.randint(-130, 130)) for size in (num, num_out))
    num_programs = max(1, (max(num, num_out) + draw.randint(-block, block)) // block)
    begin = draw.choice((0, 0, 1, -1, -130))
    x, y = torch.randn(num), torch.empty(num_out)
    report = replay(
        kernels.between_ends,
        num_programs,
        {
            "x_ptr": x, "y_ptr": y, "begin": begin, "end_load": end_load, "end_store": end_store,
            "BLOCK": block,
        },
        given=GivenMemory(undefined=["y_ptr"], outputs=["y_ptr"]),
    )  # fmt: skip
    places = begin + np.arange(num_programs * block).reshape(num_programs, block)
    for operation, end, size in (("load", end_load, num), ("store", end_store, num_out)):
        bad = (places < end) & ((places < 0) | (places >= size))
        assert lanes_outside(report, operation) == bad.sum()
        told = [f for f in report.findings if f.kind in OUTSIDE and f.operation == operation]
        assert sum(found.num_programs for found in told) == bad.any(1).sum()
        for found in told:
            first = int(np.flatnonzero(bad.any(1))[0])
            lane = int(np.flatnonzero(bad[first])[0])
            assert (found.program, found.lane) == ((first, 0, 0), (lane,))
            lanes, programs = int(bad.sum()), int(bad.any(1).sum())
            many = f"{lanes} lane{'s' * (lanes != 1)} in {programs} program{'s' * (programs != 1)}"
            assert many in finding_text(found)
    written = places[(places < end_store) & (places >= 0) & (places < num_out)]
    missing = num_out - np.unique(written).size
    told = [found for found in report.findings if found.kind is FindingKind.NEVER_WRITTEN]
    assert [found.num_lanes for found in told] == ([missing] if missing else [])


@pytest.mark.tier("sim", fast=lambda case: case.seed < 6)
@pytest.mark.parametrize("seed", range(30))
def test_lanes_of_a_tile_are_counted_one_by_one(seed: int) -> None:
    """Of views, too, between whose rows there are elements that are not theirs."""
    draw = random.Random(1000 + seed)
    num_rows, num_columns = draw.randrange(1, 40), draw.randrange(1, 40)
    pitch = num_columns + draw.choice((0, 0, 1, 5))
    rows, columns = draw.choice((1, 4, 16)), draw.choice((4, 16, 64))
    grid = tuple(
        max(1, -(-size // tile) + draw.choice((-1, 0, 0, 1)))
        for size, tile in ((num_rows, rows), (num_columns, columns))
    )
    masked = draw.choice((True, False)), draw.choice((True, False))
    whole = torch.randn(num_rows + 2, pitch)
    x: Any = whole[1 : 1 + num_rows, :num_columns]
    y = torch.empty(4096 * 16)
    report = replay(
        kernels.tile_to_row,
        grid,
        {
            "x_ptr": x, "y_ptr": y, "num_rows": num_rows, "num_columns": num_columns,
            "stride": pitch, "MASK_ROWS": masked[0], "MASK_COLUMNS": masked[1],
            "ROWS": rows, "COLUMNS": columns,
        },
    )  # fmt: skip
    bad = 0
    own = {r * pitch + c for r in range(num_rows) for c in range(num_columns)}
    for row in range(grid[0] * rows):
        for column in range(grid[1] * columns):
            is_active = (row < num_rows or not masked[0]) and (
                column < num_columns or not masked[1]
            )
            bad += is_active and row * pitch + column not in own
    assert lanes_outside(report, "load") == bad


#: Another place in each program: 127 lanes of the first are outside, and 128 of the second.
SHIFTED = """
def shifted_kernel(x_ptr, out_ptr, begin, BLOCK: tl.constexpr):
    r = tl.program_id(0) + tl.arange(0, BLOCK)
    tl.store(out_ptr + r, tl.load(x_ptr + begin * begin + r))
"""


def test_the_doctor_tells_no_mean_for_a_count() -> None:
    tensors = {"x_ptr": ("F32", (401,)), "out_ptr": ("F32", (129,))}
    launch = Launch(SHIFTED, tensors, {"begin": 20}, grid=(2,), constants={"BLOCK": 128})
    [told] = [one for one in launch.diagnosis().hypotheses if one.verdict is Verdict.CONFIRMED]
    shown = " ".join(told.evidence)
    assert "255 accesses in 2 programs" in shown
    assert "the access has no mask" in shown
    assert "128 lanes" not in shown
