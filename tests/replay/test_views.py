"""Accesses between the elements of a view are no accesses of the view; all others of it are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from specimens import replay_kernels as kernels  # noqa: E402

from hypocenter.replay.arguments import Argument, Gaps, Region  # noqa: E402
from hypocenter.replay.replay import replay  # noqa: E402

#: Shape and strides of views, and the numbers between their elements.
VIEWS: list[tuple[tuple[int, ...], tuple[int, ...], set[int]]] = [
    ((3, 4), (6, 1), {4, 5, 10, 11}),  # columns of a wider matrix
    ((4, 3), (1, 6), {4, 5, 10, 11}),  # the same, transposed
    ((3,), (2,), {1, 3}),  # every other element
    ((2, 2, 2), (12, 4, 1), {2, 3, 6, 7, 8, 9, 10, 11, 14, 15}),
    ((5, 3, 4), (0, 6, 1), {4, 5, 10, 11}),  # expanded
    ((3, 4), (4, 1), set()),  # packed
    ((4, 3), (1, 4), set()),  # packed, transposed
    ((4, 3), (1, 1), set()),  # windows that overlap
    ((2, 3), (4, 3), {1, 2, 5, 8, 9}),  # windows that overlap and leave gaps
    ((), (), set()),
    ((0, 4), (6, 1), set()),
]


@pytest.mark.parametrize(("shape", "strides", "between"), VIEWS)
def test_a_view_holds_its_elements_alone(
    shape: tuple[int, ...], strides: tuple[int, ...], between: set[int]
) -> None:
    gaps = Gaps.of(shape, strides)
    span = 1 + sum((size - 1) * by for size, by in zip(shape, strides, strict=True))
    numbers = np.arange(max(span, 0))
    found = set() if gaps is None else set(numbers[~gaps.holds(numbers)].tolist())
    assert found == between


def launch(pitch: int) -> Any:
    """Rows of 100 out of a matrix of 128, which the kernel takes to be `pitch` apart."""
    y = torch.zeros(4, 128)
    arguments = {
        "x_ptr": torch.randn(4, 128)[:, :100], "y_ptr": y[:, :100],
        "x_stride": pitch, "y_stride": pitch, "n_cols": 100, "BLOCK": 128,
    }  # fmt: skip
    return replay(kernels.scaled_rows, (4,), arguments), y


def test_rows_that_are_taken_for_packed_are_told() -> None:
    report, y = launch(100)
    found = [(f.kind, f.operation, f.argument) for f in report.findings]
    assert found == [("between rows", "load", "x_ptr"), ("between rows", "store", "y_ptr")]
    load = report.findings[0]
    assert (load.number, load.num_lanes, load.num_programs) == (100, 3 * 28, 3)
    assert load.layout is not None
    assert load.layout.strides == (128, 1)
    assert not y[:, 100:].any()  # nothing is written there


def test_a_kernel_that_steps_by_the_strides_of_its_view_is_right() -> None:
    assert launch(128)[0].findings == ()


def test_an_access_of_two_elements_must_hit_both() -> None:
    region = Region(np.zeros(64, np.uint8), 64, 4, None)
    view = Argument("x_ptr", 1, (2, 3), (4, 1), 4, region, 0, 28)
    offsets = np.array([0, 4, 8, 16])
    assert view.between(offsets, 4) is None
    missed = view.between(offsets, 8)
    assert missed is not None
    assert missed.tolist() == [False, False, True, False]
