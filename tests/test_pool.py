"""Threads share a kernel's items so that each is done once, and arguments arrive as they were."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from hypocenter.config import EngineConfig
from hypocenter.device import large_pages, pool
from hypocenter.device.lang import (
    allocating_kernel,
    cpu_kernel,
    max_num_threads,
    prange,
    set_num_threads,
)
from hypocenter.device.launch import walk_native
from hypocenter.device.native import NativeLaunches, SharedKernel
from hypocenter.device.plan import MAX_NATIVE_ROWS
from hypocenter.device.vector import get, put
from hypocenter.engine.llm import LLM
from hypocenter.errors import LaunchRejected
from hypocenter.ring import CELL_PLACE, HEADER_BYTES


@cpu_kernel
def count_up(x: Any, num_items: int) -> None:
    for item in prange(num_items):
        put(x, item, get(x, item) + np.float32(1))


@cpu_kernel
def note(out: Any, single: float, double: float, flag: bool, whole: int, wide: Any) -> None:
    for _ in prange(1):
        put(out, 0, np.float64(single))
        put(out, 1, double)
        put(out, 2, np.float64(3 if flag else 4))
        put(out, 3, np.float64(whole))
        put(out, 4, np.float64(wide.shape[0] * 1000 + wide.shape[1]))
        put(out, 5, np.float64(get(wide, 4)))


@cpu_kernel
def tell_taken(state: Any, out: Any, num_items: int) -> None:
    for item in prange(num_items):
        put(out, item, np.float64(get(state, 0) & np.uint64(0xFFFFFFFF)))


@allocating_kernel
def fail_at(x: Any, num_items: int, bad: int) -> None:
    for item in prange(num_items):
        if item == bad:
            raise ValueError
        put(x, item, np.float32(1))


@pytest.fixture(params=[1, max_num_threads()], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> int:
    set_num_threads(request.param)
    return int(request.param)


@pytest.mark.parametrize("num_items", [0, 1, 2, 63, 5000])
def test_each_item_is_done_once(num_items: int) -> None:
    x = np.zeros(5000, np.float32)
    launch = SharedKernel(count_up.shared).bound((x, num_items))
    for _ in range(100):
        launch()
    np.testing.assert_array_equal(x, np.where(np.arange(5000) < num_items, 100, 0))


def test_a_thread_takes_runs_of_neighbours_and_single_items_in_the_end() -> None:
    """Items lie one behind the other in memory, which is read faster in one stream."""
    set_num_threads(1)  # of several nobody knows who takes what
    taken = np.zeros(40)
    SharedKernel(tell_taken.shared).bound((pool._state, taken, 40))()
    assert taken.tolist() == [20] * 20 + [30] * 10 + [35] * 5 + [37] * 2 + [38, 39, 40]


def test_launches_of_a_step_do_not_mix_their_items() -> None:
    """Many short ones, so that a helper that comes late meets the next launch's ticket."""
    arrays = [np.zeros(size, np.float32) for size in (1, 7, 64, 3)]
    kernel = SharedKernel(count_up.shared)
    kernel.bound((arrays[0], 0))()  # compiles it
    rows = [(n, kernel, (x, len(x))) for n, x in enumerate(arrays * 50)]
    step, place = NativeLaunches(rows), np.zeros(1, np.uint64)
    for repetition in range(20):
        assert step.run(place.ctypes.data, 7000) == len(rows)
        assert place[0] == 7000 + len(rows) - 1
        for x in arrays:
            np.testing.assert_array_equal(x, 50 * (repetition + 1))


def test_a_step_writes_its_places_into_the_record_that_is_open_now() -> None:
    """The address is kept from step to step, but not beyond a record's end."""
    x, kernel = np.zeros(3, np.float32), SharedKernel(count_up.shared)
    kernel.bound((x, 0))()
    step = NativeLaunches([(0, kernel, (x, 3)), (1, kernel, (x, 3))])
    records = [memoryview(bytearray(HEADER_BYTES)).cast("Q") for _ in range(2)]
    for word, cells in enumerate((records[0], records[0], records[1], records[0]), 1):
        walk_native(step, [cast(Any, None)] * 2, cells, word << 32)
        assert cells[CELL_PLACE] == (word << 32) + 1
    assert records[1][CELL_PLACE] == (3 << 32) + 1


@pytest.mark.parametrize("bad", [0, 1, 4999])
def test_an_item_that_fails_fails_the_step_whoever_took_it(bad: int) -> None:
    """What comes behind it is not run, and the next step is none the worse."""
    x, after = np.zeros(5000, np.float32), np.zeros(3, np.float32)
    failing, counting = SharedKernel(fail_at.shared), SharedKernel(count_up.shared)
    counting.bound((after, 0))()
    failing.bound((x, 5000, -1))()
    place = np.zeros(1, np.uint64)
    step = NativeLaunches(
        [(0, counting, (after, 1)), (1, failing, (x, 5000, bad)), (2, counting, (after, 3))]
    )
    for repetition in range(30):
        assert step.run(place.ctypes.data, 0) == 1
        np.testing.assert_array_equal(after, [repetition + 1, 0, 0])
    with pytest.raises(LaunchRejected, match="fail_at: the kernel found no memory"):
        failing.bound((x, 5000, bad))()


@pytest.mark.parametrize("form", ["serial", "shared"])
def test_arguments_of_every_kind_arrive(form: str) -> None:
    out, wide = np.zeros(6), np.arange(12, dtype=np.int32).reshape(3, 4)
    args = (out, np.float32(0.1), 0.2, False, -(1 << 40), wide)
    note.serial(*args)
    expected = out.copy()
    out[:] = 0
    kernel: Any = note.serial
    if form == "shared":
        kernel = SharedKernel(note.shared)
        kernel.bound(args)()
        out[:] = 0
    place = np.zeros(1, np.uint64)
    assert NativeLaunches([(0, kernel, args)]).run(place.ctypes.data, 0) == 1
    np.testing.assert_array_equal(out, expected)
    assert expected.tolist() == [float(np.float32(0.1)), 0.2, 4, -(2.0**40), 3004, 4]


def test_a_plan_as_one_call_gives_the_bits_of_its_launches_one_by_one() -> None:
    with LLM(config=EngineConfig(context_length=64)) as llm:
        ids = [1, 5, 9, 200, 31]
        together = llm.logits(ids)
        runner = llm.engine.runner
        plans = [plan for plan in runner._plans.values() if plan._native is not None]
        assert plans, "no plan runs as one call"
        for plan in plans:
            plan._native = None
        np.testing.assert_array_equal(llm.logits(ids).view(np.uint32), together.view(np.uint32))
    assert MAX_NATIVE_ROWS >= 1


def test_packed_weights_begin_at_cache_lines_and_do_not_overlap() -> None:
    first = large_pages.zeros((3, 5), np.float32)
    second = large_pages.zeros((70 << 20,), np.uint8)
    third = large_pages.zeros((0,), np.float32)
    assert all(one.ctypes.data % 64 == 0 for one in (first, second, third))
    assert not np.shares_memory(first, second)
    second[:] = 1
    assert not first.any()
