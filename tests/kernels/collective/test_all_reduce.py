"""The sum over more than two ranks: added in their order, whatever other rows there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices, memory
from hypocenter.device.plan import Plan, PlanBuilder
from hypocenter.kernels.collective.collectives import all_reduce, gathered_rows

GPU = "sim:h200"


def allocated(name: str, values: Array, dtype: DType = DType.F32) -> Any:
    tensor = memory.allocate(name, "test", dtype, values.shape, device=GPU)
    copies.to_device(tensor, values)
    return tensor


def summed(given: Array, num_live: int) -> Array:
    """What the first rank has of given f32 [num_ranks, num_rows, width] behind the sum."""
    devices.open_device(GPU)
    num_ranks, num_rows, width = given.shape

    def all_gather(part: Array, parts: Array) -> None:
        np.copyto(parts.reshape(given.shape), given)

    group: Any = SimpleNamespace(num_ranks=num_ranks, peer_sum=None, all_gather=all_gather)
    x = allocated("x", given[0])
    live = allocated("counts", np.array([num_live, num_live], np.int32), DType.I32)
    # As all steps have it: with room for more rows than this one has.
    room = np.full((gathered_rows(num_ranks, num_rows + 3), width), np.nan, np.float32)
    plan = PlanBuilder(num_rows, GPU)
    all_reduce(plan, group, x, live, allocated("gathered", room))
    checked = Plan(plan, x)
    checked.set_mode("checked")
    checked.run()
    return np.array(copies.to_host(x))


def parts_of(num_ranks: int, num_rows: int, width: int) -> Array:
    """Numbers whose sum depends on the order in which they are added."""
    random = np.random.default_rng(num_ranks)
    exponents = random.integers(-12, 12, (num_ranks, num_rows, width))
    return (random.standard_normal(exponents.shape) * np.exp2(exponents)).astype(np.float32)


@pytest.mark.parametrize("num_ranks", [3, 4, 8])
def test_parts_are_added_in_the_order_of_ranks(num_ranks: int) -> None:
    given = parts_of(num_ranks, 5, 700)
    expected = given[0].copy()
    for part in given[1:]:
        expected += part
    assert np.array_equal(summed(given, 5), expected)
    assert not np.array_equal(expected, given[::-1].sum(0)), "the order is seen"


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    given = parts_of(4, 6, 64)
    together = summed(given, 6)
    for row in range(6):
        assert np.array_equal(summed(given[:, row : row + 1], 1)[0], together[row])


def test_rows_that_are_not_live_are_left() -> None:
    given = parts_of(3, 4, 64)
    assert np.array_equal(summed(given, 2)[2:], given[0, 2:])


def test_two_ranks_gather_nothing() -> None:
    assert gathered_rows(2, 8) == 0
    assert gathered_rows(3, 8) == 24
