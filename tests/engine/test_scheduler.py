"""Scheduling: who runs in a step, in which order, and who gives way when the cache is full."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pytest
from pretended.fake_runner import FakeDetokenizer

from hypocenter.base.errors import IntegrityError, OutOfBlocks
from hypocenter.engine.answer_text import AnswerText
from hypocenter.engine.batch import Chunk, make_batch
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.request import AnswerPlan, Request, State
from hypocenter.engine.scheduler import Scheduler
from hypocenter.model.facts.pooling import Pooling
from hypocenter.settings.config import SamplingParams


def make_scheduler(
    num_blocks: int = 100,
    max_batch_tokens: int = 10,
    max_batch_requests: int = 4,
    *,
    reads_whole: bool = False,
) -> Scheduler:
    return Scheduler(
        KVCache(num_blocks, 4),
        max_batch_tokens=max_batch_tokens,
        max_batch_requests=max_batch_requests,
        reads_whole=reads_whole,
    )


def make_request(
    request_id: int,
    num_tokens: int,
    *,
    keeps_logits: bool = False,
    pooling: Pooling | None = None,
    num_first: int | None = None,
) -> Request:
    return Request(
        request_id,
        [100 * request_id + n for n in range(num_tokens)],
        SamplingParams(max_tokens=None),
        AnswerPlan(
            text=AnswerText(cast(Any, FakeDetokenizer()), SamplingParams(), None),
            end_ids=frozenset(),
            context_length=10_000,
            keeps_logits=keeps_logits or pooling is not None,
            pooling=pooling,
            num_first=num_first,
        ),
    )


def add(scheduler: Scheduler, lengths: Iterable[int]) -> list[Request]:
    requests = [make_request(number, length) for number, length in enumerate(lengths)]
    for request in requests:
        scheduler.add(request)
    return requests


def step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Schedule, and settle as the engine would; (request, start, stop) of each chunk."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        chunk.request.advance(chunk.num_tokens)
        if chunk.samples:
            chunk.request.accept(5)
    scheduler.check_integrity()
    return [(chunk.request.id, chunk.start, chunk.stop) for chunk in chunks]


def test_texts_that_are_read_whole_are_never_cut() -> None:
    """A later one that fits runs beside those before it; one that does not is first in the next."""
    scheduler = make_scheduler(reads_whole=True)
    add(scheduler, [4, 5, 6, 1])
    done = [[(number, stop) for number, start, stop in step(scheduler)] for _ in range(1)]
    assert done == [[(0, 4), (1, 5), (3, 1)]]
    for request in [r for r in scheduler.running if r.num_computed]:
        scheduler.finish(request, "length")
    assert step(scheduler) == [(2, 0, 6)]


@pytest.mark.parametrize(
    ("rows", "kept"),
    [("all", [0, 1, 2, 3, 4, 5, 6]), ("first", [0, 4]), ("last", [3, 6])],
)
def test_rows_that_stand_for_a_text(rows: Any, kept: list[int]) -> None:
    scheduler = make_scheduler(reads_whole=True)
    pooling = Pooling("mean", rows)
    for number, length in enumerate((4, 3)):
        scheduler.add(make_request(number, length, pooling=pooling, num_first=2))
    batch = make_batch(scheduler.schedule(), scheduler.cache)
    assert batch.logit_rows.tolist() == kept
    assert batch.text_kinds.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert batch.last_seen.tolist() == [3, 3, 3, 3, 2, 2, 2]


def test_a_text_in_parts_keeps_its_last_row_alone() -> None:
    scheduler = make_scheduler(max_batch_tokens=3)
    request = make_request(0, 7, pooling=Pooling("last", "last"))
    scheduler.add(request)
    kept = []
    while not request.has_read_all:
        [chunk] = scheduler.schedule()
        kept.append(make_batch([chunk], scheduler.cache).logit_rows.tolist())
        request.advance(chunk.num_tokens)
    assert kept == [[], [], [0]]


def test_a_long_prompt_runs_in_chunks_and_then_token_by_token() -> None:
    scheduler = make_scheduler()
    (request,) = add(scheduler, [23])
    assert [step(scheduler)[0] for _ in range(5)] == [
        (0, 0, 10),
        (0, 10, 20),
        (0, 20, 23),
        (0, 23, 24),
        (0, 24, 25),
    ]
    assert len(request.output_ids) == 3


def test_generation_goes_before_prompts_and_prompts_fill_up() -> None:
    scheduler = make_scheduler()
    add(scheduler, [2, 10, 9])
    assert step(scheduler) == [(0, 0, 2), (1, 0, 8)]
    assert step(scheduler) == [(0, 2, 3), (1, 8, 10), (2, 0, 7)]
    assert step(scheduler) == [(0, 3, 4), (1, 10, 11), (2, 7, 9)]


def test_short_prompts_get_half_a_step_next_to_a_long_one() -> None:
    scheduler = make_scheduler()
    add(scheduler, [2, 25, 4])
    assert step(scheduler) == [(0, 0, 2), (1, 0, 4), (2, 0, 4)]
    assert step(scheduler) == [(0, 2, 3), (1, 4, 12), (2, 4, 5)]
    assert step(scheduler) == [(0, 3, 4), (1, 12, 20), (2, 5, 6)]


def test_only_one_long_prompt_is_read_at_a_time() -> None:
    scheduler = make_scheduler()
    add(scheduler, [25, 25, 7])
    assert step(scheduler) == [(0, 0, 5), (2, 0, 5)]
    assert step(scheduler) == [(0, 5, 13), (2, 5, 7)]
    assert step(scheduler) == [(0, 13, 22), (2, 7, 8)]
    assert step(scheduler) == [(0, 22, 25), (1, 0, 6), (2, 8, 9)]
    assert step(scheduler) == [(0, 25, 26), (1, 6, 14), (2, 9, 10)]


@pytest.mark.parametrize("num_long", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", range(1, 11))
@pytest.mark.parametrize("num_steps_before", range(6))
def test_a_short_prompt_is_at_most_two_chunks_late(
    num_long: int, num_tokens: int, num_steps_before: int
) -> None:
    scheduler = make_scheduler(num_blocks=500, max_batch_requests=8)
    add(scheduler, [38] * num_long)
    for _ in range(num_steps_before):
        step(scheduler)
    short = make_request(num_long, num_tokens)
    scheduler.add(short)
    num_steps = 0
    while not short.output_ids:
        step(scheduler)
        num_steps += 1
    num_generating = sum(len(request.output_ids) > 0 for request in scheduler.running) - 1
    num_steps_alone = -(-num_tokens // (10 - num_generating))
    assert num_steps <= num_steps_alone + 2


def test_nothing_is_launched_ahead_of_a_prompt_that_still_waits_for_its_turn() -> None:
    scheduler = make_scheduler(max_batch_tokens=4)
    add(scheduler, [4, 9])
    chunks = scheduler.schedule()
    assert [chunk.request.id for chunk in chunks] == [0]
    assert all(chunk.samples for chunk in chunks)
    assert scheduler.schedule_ahead(chunks) == []


def test_nobody_overtakes_when_there_are_too_many_requests() -> None:
    scheduler = make_scheduler(max_batch_requests=2)
    first, *_ = add(scheduler, [1, 1, 1, 1])
    assert [chunk[0] for chunk in step(scheduler)] == [0, 1]
    assert [chunk[0] for chunk in step(scheduler)] == [0, 1]
    scheduler.remove(first)
    assert [chunk[0] for chunk in step(scheduler)] == [1, 2]


def test_a_large_request_in_front_is_not_overtaken_by_a_small_one() -> None:
    scheduler = make_scheduler(num_blocks=6)
    first, *_ = add(scheduler, [8, 17, 1])
    assert [chunk[0] for chunk in step(scheduler)] == [0]
    assert [chunk[0] for chunk in step(scheduler)] == [0]
    scheduler.remove(first)
    assert [chunk[0] for chunk in step(scheduler)] == [1]


def test_more_generating_requests_than_the_budget_holds() -> None:
    scheduler = make_scheduler(max_batch_tokens=3)
    add(scheduler, [1, 1, 1, 1])
    assert [chunk[0] for chunk in step(scheduler)] == [0, 1, 2]
    assert [chunk[0] for chunk in step(scheduler)] == [0, 1, 2]


def test_the_newest_gives_way_and_comes_back_first() -> None:
    scheduler = make_scheduler(num_blocks=6, max_batch_tokens=20)
    first, second, third = add(scheduler, [4, 4, 4])
    for _ in range(5):
        assert [chunk[0] for chunk in step(scheduler)] == [0, 1, 2]
    # Each has filled two blocks and wants a third.
    assert step(scheduler) == [(0, 8, 9), (1, 8, 9)]
    assert third.state is State.WAITING
    assert (third.num_computed, third.num_preemptions) == (0, 1)
    scheduler.add(make_request(3, 1))
    scheduler.remove(first)
    scheduler.remove(second)
    assert step(scheduler) == [(2, 0, 9), (3, 0, 1)]
    assert len(third.output_ids) == 6  # the five that it had were computed again, not drawn again
    assert (first.num_preemptions, second.num_preemptions) == (0, 0)


def test_nobody_is_let_in_only_to_be_thrown_out() -> None:
    scheduler = make_scheduler(num_blocks=3, max_batch_tokens=20)
    first, second = add(scheduler, [8, 4])
    assert step(scheduler) == [(0, 0, 8)]
    assert step(scheduler) == [(0, 8, 9)]
    scheduler.remove(first)
    assert step(scheduler) == [(1, 0, 4)]
    assert second.num_preemptions == 0


def test_without_blocks_the_newest_waits_and_keeps_what_it_has() -> None:
    scheduler = make_scheduler(num_blocks=4, max_batch_tokens=20)
    first, second = add(scheduler, [8, 4])
    assert len(step(scheduler)) == 2
    assert step(scheduler) == [(0, 8, 9)]
    assert (second.state, second.num_computed, second.num_preemptions) == (State.RUNNING, 4, 0)
    scheduler.remove(first)
    assert step(scheduler) == [(1, 4, 5)]


def test_alone_and_without_blocks_is_an_error_of_that_request() -> None:
    scheduler = make_scheduler(num_blocks=1, max_batch_tokens=20)
    request, behind = add(scheduler, [4, 1])
    assert step(scheduler) == [(0, 0, 4)]
    assert step(scheduler) == [(1, 0, 1)]
    assert request.done
    assert isinstance(request.error, OutOfBlocks)
    assert behind.error is None


def test_remove_forgets_a_request_wherever_it_stands() -> None:
    scheduler = make_scheduler(max_batch_requests=1)
    running, waiting = add(scheduler, [3, 3])
    step(scheduler)
    scheduler.remove(waiting)
    scheduler.remove(running)
    scheduler.remove(running)
    assert step(scheduler) == []
    assert scheduler.cache.num_free_blocks == 100


def test_every_request_ends_when_memory_is_scarce() -> None:
    rng = np.random.default_rng(3)
    scheduler = make_scheduler(num_blocks=9, max_batch_tokens=7)
    requests = add(scheduler, rng.integers(1, 20, 12).tolist())
    order = []
    for _ in range(2000):
        step(scheduler)
        for request in [request for request in scheduler.running if len(request.output_ids) > 12]:
            scheduler.remove(request)
            order.append(request.id)
    assert sorted(order) == list(range(12))
    assert sum(request.num_preemptions for request in requests) > 0
    # Oldest first in principle; a short one may pass those that run beside it, never the queue.
    assert all(
        abs(place - number) < scheduler.max_batch_requests for place, number in enumerate(order)
    )


def test_a_batch_lays_chunks_out_side_by_side() -> None:
    cache = KVCache(10, 4)
    scheduler = Scheduler(cache, max_batch_tokens=20, max_batch_requests=4)
    scheduler.add(make_request(0, 6))
    assert step(scheduler) == [(0, 0, 6)]
    scheduler.add(make_request(1, 3, keeps_logits=True))
    scheduler.add(make_request(2, 2))
    chunks = scheduler.schedule()
    batch = make_batch(chunks, cache)
    assert batch.token_ids.tolist() == [5, 100, 101, 102, 200, 201]
    assert batch.positions.tolist() == [6, 0, 1, 2, 0, 1]
    assert batch.slots.tolist() == [6, 8, 9, 10, 12, 13]
    assert batch.sequence_rows.tolist() == [0, 1, 1, 1, 2, 2]
    assert batch.block_tables.tolist() == [[0, 1], [2, -1], [3, -1]]
    assert batch.logit_rows.tolist() == [0, 5, 1, 2, 3]  # kept rows come last


def test_a_chunk_that_does_not_reach_the_end_has_no_logits() -> None:
    cache = KVCache(10, 4)
    request = make_request(0, 8)
    cache.append(0, 5)
    assert make_batch([Chunk.next_of(request, 5)], cache).logit_rows.size == 0


def test_the_check_sees_requests_and_cache_disagree() -> None:
    scheduler = make_scheduler()
    first, second = add(scheduler, [3, 3])
    step(scheduler)
    first.num_computed += 1
    with pytest.raises(IntegrityError, match="request 0 has computed 4 tokens, but has room for 3"):
        scheduler.check_integrity()
    first.num_computed -= 1
    scheduler.running.reverse()
    with pytest.raises(IntegrityError, match="out of order or doubled"):
        scheduler.check_integrity()
    scheduler.running.remove(second)
    with pytest.raises(IntegrityError, match=r"requests \[1\] own blocks and do not run"):
        scheduler.check_integrity()
