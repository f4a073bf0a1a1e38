"""Steps that read prompts while others answer: cut so that they keep within a target."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from pretended.fake_runner import FakeDetokenizer

from hypocenter.engine.answer_text import AnswerText
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.pace import StepPace
from hypocenter.engine.request import AnswerPlan, Request
from hypocenter.engine.scheduler import Scheduler
from hypocenter.settings.config import SamplingParams

MOST = 2048


def seconds_of(num_tokens: int, per_token: float = 5e-5, alone: float = 0.008) -> float:
    """What a step takes on a GPU that is easily told about."""
    return alone + per_token * num_tokens


def make_request(number: int, num_tokens: int) -> Request:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    text = AnswerText(cast(Any, FakeDetokenizer()), params, None)
    plan = AnswerPlan(text=text, end_ids=frozenset(), context_length=1000)
    return Request(number, [number + 1] * num_tokens, params, plan)


def run(pace: StepPace, num_generating: int, num_steps: int, per_token: float = 5e-5) -> list[int]:
    """Sizes of so many steps that read as much of prompts as they may."""
    sizes = []
    for _ in range(num_steps):
        sizes.append(pace.room(num_generating))
        pace.note(sizes[-1], num_generating, seconds_of(sizes[-1], per_token))
    return sizes


def test_a_step_is_as_long_as_the_target_allows() -> None:
    pace = StepPace(0.04, MOST)
    pace.note(8, 8, seconds_of(8))
    sizes = run(pace, 8, 20)
    assert 0.9 * 0.04 < seconds_of(sizes[-1]) <= 0.04
    assert max(map(seconds_of, sizes)) <= 0.04  # nor is it learnt by longer ones


def test_without_a_target_a_step_takes_50_ms_or_five_without_prompts() -> None:
    quick, slow = StepPace(None, MOST), StepPace(None, MOST)
    for _ in range(50):
        quick.note(64, 64, 0.006)
        slow.note(64, 64, 0.016)
    assert quick.target == 0.05
    assert slow.target == pytest.approx(0.08)
    for pace in (quick, slow):
        last = seconds_of(run(pace, 64, 20)[-1])
        assert 0.85 * pace.target < last <= pace.target


def test_where_nobody_answers_a_step_is_whole() -> None:
    pace = StepPace(0.001, MOST)
    assert run(pace, 0, 3) == [MOST] * 3


@pytest.mark.parametrize("num_generating", [1, 64, 200])
def test_prompts_never_starve(num_generating: int) -> None:
    pace = StepPace(0.001, MOST)  # nothing is as quick
    assert run(pace, num_generating, 10)[-1] == num_generating + 64


def test_one_slow_step_is_forgotten_soon() -> None:
    pace = StepPace(0.04, MOST)
    pace.note(8, 8, 0.008)
    before = run(pace, 8, 20)[-1]
    pace.note(before, 8, 0.4)  # a plan was made
    assert pace.room(8) < 0.6 * before
    assert run(pace, 8, 6)[-1] == pytest.approx(before, rel=0.05)


def test_steps_that_use_little_of_their_room_tell_nothing() -> None:
    pace = StepPace(0.04, MOST)
    before = run(pace, 8, 20)[-1]
    for _ in range(5):
        pace.note(30, 8, 0.039)
    assert pace.room(8) == before


def test_a_machine_that_becomes_slower_gets_shorter_steps() -> None:
    pace = StepPace(0.04, MOST)
    pace.note(8, 8, seconds_of(8))
    run(pace, 8, 20)
    size = run(pace, 8, 20, per_token=2e-4)[-1]
    assert 0.9 * 0.04 < seconds_of(size, 2e-4) <= 0.04


def test_the_scheduler_cuts_prompts_and_reads_all_of_them() -> None:
    pace = StepPace(0.02, 512)
    scheduler = Scheduler(KVCache(400, 16), max_batch_tokens=512, max_batch_requests=8, pace=pace)
    chance = random.Random(0)
    requests = [make_request(number, chance.choice((1, 90, 700))) for number in range(8)]
    for request in requests[:4]:
        scheduler.add(request)
    longest = 0.0
    for step in range(200):
        if step == 1:
            for request in requests[4:]:
                scheduler.add(request)
        chunks = scheduler.schedule()
        if not chunks:
            break
        total = sum(chunk.num_tokens for chunk in chunks)
        generating = sum(chunk.num_tokens == 1 for chunk in chunks)
        if generating:
            longest = max(longest, seconds_of(total))
            assert total <= pace.room(generating)
        pace.note(total, generating, seconds_of(total))
        for chunk in chunks:
            chunk.request.advance(chunk.num_tokens)
            if chunk.samples:
                chunk.request.accept(7)
            if chunk.request.done:
                scheduler.remove(chunk.request)
    assert all(request.done for request in requests)
    # What is tried first, before a step has told anything.
    assert 0 < longest <= seconds_of(256 + 8)
