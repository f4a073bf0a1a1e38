"""Threads share a kernel's items so that each is done once, and arguments arrive as they were."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from ops.kernel_launch import for_python

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.tensor import DType
from hypocenter.device import memory
from hypocenter.device import plan as plan_module
from hypocenter.device.cpu import large_pages, pool_steps
from hypocenter.device.cpu.kernel_forms import kernel_at_hand
from hypocenter.device.cpu.lang import allocating_kernel, cpu_kernel, prange
from hypocenter.device.cpu.native import BoundLaunch, NativeLaunches
from hypocenter.device.cpu.shared_state import (
    BLOCK,
    CLOSED,
    ENTRY,
    ITEM_BYTES,
    NEXT,
    NUM_FIELDS,
    NUM_REGIONS_OFFSET,
    REGION_WORDS,
    REGIONS_OFFSET,
    SPREAD,
    STATE,
    STRETCHES,
    TICKET,
)
from hypocenter.device.cpu.threads import max_num_threads, set_num_threads
from hypocenter.device.cpu.vector import get, put
from hypocenter.device.launch import walk_native
from hypocenter.device.plan import MAX_NATIVE_ROWS
from hypocenter.engine.llm import LLM
from hypocenter.record.ring import CELL_PLACE, HEADER_BYTES
from hypocenter.settings.config import EngineConfig

needs_two_threads = pytest.mark.skipif(
    max_num_threads() < 2, reason="there is room for the regions of as many threads as cores"
)


_fetch_some, _share = for_python(pool_steps._fetch_some), for_python(pool_steps._share)


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
def note_order(order: Any, num_items: int) -> None:
    for item in prange(num_items):
        put(order, 0, get(order, 0) + np.int64(1))
        put(order, get(order, 0), np.int64(item))


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
    launch = BoundLaunch(kernel_at_hand(count_up).form(is_shared=True), (x, num_items))
    for _ in range(100):
        launch()
    np.testing.assert_array_equal(x, np.where(np.arange(5000) < num_items, 100, 0))


@needs_two_threads
@pytest.mark.parametrize(
    ("thread", "expected"), [(0, [*range(10)]), (1, [*range(5, 10), *range(5)])]
)
def test_a_thread_takes_its_own_region_first_and_then_what_others_left(
    thread: int, expected: list[int]
) -> None:
    """Of two, one of which does not come. Neighbours lie one behind the other in memory."""
    order = np.zeros(11, np.int64)
    _alone(thread, order)
    assert order.tolist() == [10, *expected]


@needs_two_threads
def test_items_that_another_has_taken_are_left_to_it() -> None:
    order = np.zeros(11, np.int64)
    _alone(0, order, taken=(1, 4))
    assert order.tolist() == [5, 1, 2, 3, 4, 9, 0, 0, 0, 0, 0]


@needs_two_threads
def test_a_thread_that_comes_behind_the_end_takes_nothing() -> None:
    order = np.zeros(11, np.int64)
    _alone(1, order, ticket=CLOSED)
    assert not order.any()


def _alone(
    thread: int, order: np.ndarray[Any, Any], *, ticket: Any = 1 << 32, taken: Sequence[int] = ()
) -> None:
    """One of two threads in a launch of ten items, of whose regions some items are `taken`."""
    kernel = kernel_at_hand(note_order).form(is_shared=True)
    BoundLaunch(kernel, (np.zeros(1, np.int64), 0))()  # compiles it
    launches = NativeLaunches([(0, kernel, (order, 10))])
    row = launches._steps._table[0]
    STATE[:] = 0
    STATE[NUM_REGIONS_OFFSET] = 2
    for region, num_taken in enumerate(taken):
        STATE[REGIONS_OFFSET + region * REGION_WORDS] = ticket + num_taken
    STATE[TICKET] = ticket
    call = ctypes.CFUNCTYPE(*[ctypes.c_int64] * 4)(int(row[SPREAD]))
    assert call(int(row[ENTRY]), int(row[BLOCK]), thread) == 0


def test_launches_of_a_step_do_not_mix_their_items() -> None:
    """Many short ones, so that a helper that comes late meets the next launch's ticket."""
    arrays = [np.zeros(size, np.float32) for size in (1, 7, 64, 3)]
    kernel = kernel_at_hand(count_up).form(is_shared=True)
    BoundLaunch(kernel, (arrays[0], 0))()  # compiles it
    rows = [(n, kernel, (x, len(x))) for n, x in enumerate(arrays * 50)]
    step, place = NativeLaunches(rows), np.zeros(1, np.uint64)
    for repetition in range(20):
        assert step.run(place.ctypes.data, 7000) == len(rows)
        assert place[0] == 7000 + len(rows) - 1
        for x in arrays:
            np.testing.assert_array_equal(x, 50 * (repetition + 1))


def test_a_step_writes_its_places_into_the_record_that_is_open_now() -> None:
    """The address is kept from step to step, but not beyond a record's end."""
    x, kernel = np.zeros(3, np.float32), kernel_at_hand(count_up).form(is_shared=True)
    BoundLaunch(kernel, (x, 0))()
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
    failing, counting = (
        kernel_at_hand(fail_at).form(is_shared=True),
        kernel_at_hand(count_up).form(is_shared=True),
    )
    BoundLaunch(counting, (after, 0))()
    BoundLaunch(failing, (x, 5000, -1))()
    place = np.zeros(1, np.uint64)
    step = NativeLaunches(
        [(0, counting, (after, 1)), (1, failing, (x, 5000, bad)), (2, counting, (after, 3))]
    )
    for repetition in range(30):
        assert step.run(place.ctypes.data, 0) == 1
        np.testing.assert_array_equal(after, [repetition + 1, 0, 0])
    with pytest.raises(LaunchRejected, match="fail_at: the kernel found no memory"):
        BoundLaunch(failing, (x, 5000, bad))()


@pytest.mark.parametrize("form", ["serial", "shared"])
def test_arguments_of_every_kind_arrive(form: str) -> None:
    out, wide = np.zeros(6), np.arange(12, dtype=np.int32).reshape(3, 4)
    args = (out, np.float32(0.1), 0.2, False, -(1 << 40), wide)
    note.serial(*args)
    expected = out.copy()
    out[:] = 0
    kernel = kernel_at_hand(note).form(is_shared=form == "shared")
    BoundLaunch(kernel, args)()
    np.testing.assert_array_equal(out, expected)
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


def test_threads_fetch_from_where_they_will_begin_to_read() -> None:
    """The first item of a thread's region, in whichever of the stretches that lies."""
    row = np.zeros(NUM_FIELDS, np.int64)
    row[ITEM_BYTES] = 1 << 18
    row[STRETCHES:] = (100 << 20, 4, 200 << 20, 2, 300 << 20, 3)
    table = row[None]
    item_of = {0: 100, 1: 100 + 1 / 4, 2: 100 + 2 / 4, 4: 200, 6: 300, 8: 300 + 2 / 4}
    for num_threads in (1, 2, 4, 9):
        for thread in range(num_threads):
            first = 9 * thread // num_threads
            if first in item_of:
                at, stop = _share(table, 0, thread, num_threads)
                assert at == item_of[first] * (1 << 20), (thread, num_threads)
                assert stop - at == pool_steps._MOST_BYTES
    assert _share(table, 1, 0, 2) == (0, 0), "behind the last launch"


def test_what_is_fetched_ends_with_the_weights() -> None:
    """Loads beyond them might find no memory there."""
    table = np.zeros((1, NUM_FIELDS), np.int64)
    table[0, ITEM_BYTES] = pool_steps._FETCH_BYTES + 64
    table[0, STRETCHES : STRETCHES + 2] = 1 << 20, 3
    for thread, num_left in ((0, 3), (1, 2), (2, 1)):
        at, stop = _share(table, 0, thread, 3)
        num_bytes = num_left * (pool_steps._FETCH_BYTES + 64)
        assert at == (1 << 20) + (3 - num_left) * (pool_steps._FETCH_BYTES + 64)
        assert num_bytes - pool_steps._FETCH_BYTES < stop - at <= num_bytes
        assert (stop - at) % pool_steps._FETCH_BYTES == 0


def test_fetching_loads_each_line() -> None:
    """Nobody looks at what is loaded, so the compiler might leave it out."""
    num_lines = 3 * pool_steps._FETCH_BYTES // 64
    lines = large_pages.zeros((num_lines, 8), np.int64)
    at, stop = lines.ctypes.data, lines.ctypes.data + lines.nbytes
    for _ in range(3):
        assert at < stop
        at = _fetch_some(at, stop)
    assert at == stop == _fetch_some(at, stop)
    (code,) = _fetch_some.inspect_llvm().values()
    assert len(re.findall(r"load atomic", code)) >= pool_steps._FETCH_BYTES // 64


def test_each_launch_knows_the_next_that_reads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MIN_PARALLEL_WORK", 1)  # products of several weights too
    with LLM(config=EngineConfig(context_length=64)) as llm:
        llm.logits([1, 5, 9])
        plan = next(plan for plan in llm.engine.runner._plans.values() if plan._native)
        table = cast(NativeLaunches, plan._native)._steps._table
        readers = [
            n for n, one in enumerate(plan.launches)
            if one.kernel.startswith("linear") and one.function.is_shared
        ]  # fmt: skip
        assert any("weight_2" in plan.launches[index].facts for index in readers)
        assert any(plan.launches[index].kernel == "linear_gate_codes" for index in readers)
        for index, row in enumerate(table):
            later = [n for n in readers if n > index]
            assert row[NEXT] == (later[0] if later else len(table))
        for index in readers:
            facts = plan.launches[index].facts
            weights = [facts[name] for name in ("weight", "weight_2", "weight_3") if name in facts]
            stretches = table[index, STRETCHES:].reshape(-1, 2)
            for (at, num_items), weight in zip(stretches, weights, strict=False):
                assert at == weight.data.parts[0].ctypes.data
                rows = 128 if plan.launches[index].kernel == "linear_gate_codes" else 64
                assert num_items * rows >= weight.shape[0] > (num_items - 1) * rows
                assert num_items * table[index, ITEM_BYTES] == weight.data.parts[0].nbytes
            assert not stretches[len(weights) :].any()
            assert stretches[: len(weights)].all()


def test_packed_weights_begin_at_cache_lines_and_do_not_overlap() -> None:
    first = large_pages.zeros((3, 5), np.float32)
    second = large_pages.zeros((70 << 20,), np.uint8)
    third = large_pages.zeros((0,), np.float32)
    assert all(one.ctypes.data % 64 == 0 for one in (first, second, third))
    assert not np.shares_memory(first, second)
    second[:] = 1
    assert not first.any()


def test_caches_of_keys_lie_in_large_pages() -> None:
    """On small ones a token at depth 2000 takes up to 3 % longer."""
    small = memory.allocate("small", "test", DType.F16, (large_pages.PAGE_BYTES // 2 - 1,))
    large = memory.allocate("large", "test", DType.F16, (large_pages.PAGE_BYTES // 2,))
    assert np.shares_memory(large.data, large_pages._stretch)
    assert not np.shares_memory(small.data, large_pages._stretch)
    assert not large.data.any()
