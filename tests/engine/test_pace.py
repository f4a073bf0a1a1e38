"""Steps that read prompts while others answer: cut so that they keep within a target."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from pretended.fake_runner import FakeDetokenizer

from hypocenter.device.plan import bucket
from hypocenter.engine.answer_text import AnswerText
from hypocenter.engine.kv_cache import KVCache
from hypocenter.engine.pace import StepPace
from hypocenter.engine.request import AnswerPlan, Request
from hypocenter.engine.scheduler import Scheduler
from hypocenter.settings.config import SamplingParams

MOST = 2048


def seconds_of(num_tokens: int, per_token: float = 5e-5, alone: float = 0.008) -> float:
    """What a step takes on a GPU that is easily told about: as its bucket says."""
    return alone + per_token * bucket(num_tokens, MOST)


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


def longest(target: float, per_token: float = 5e-5) -> int:
    """The largest step within a target."""
    sizes = (64, 128, 256, 512, 1024, 2048)
    return max(size for size in sizes if seconds_of(size, per_token) <= target)


@pytest.mark.parametrize("target", [0.02, 0.03, 0.04, 0.1])
def test_a_step_is_as_long_as_the_target_allows(target: float) -> None:
    pace = StepPace(target, MOST)
    pace.note(8, 8, seconds_of(8))
    sizes = run(pace, 8, 20)
    assert sizes[-1] == longest(target)
    too_long = [size for size in sizes if seconds_of(size) > target]
    assert len(too_long) <= 6, "how long a size takes it is told soon"
    for _ in range(1000):
        pace.note(8, 8, seconds_of(8))
    too_long = [size for size in run(pace, 8, 20) if seconds_of(size) > target]
    assert len(too_long) <= 1, "and it remembers, when it tries that again"


def test_a_step_ends_where_its_bucket_does() -> None:
    """One more token would make it as long as a step of twice as many."""
    pace = StepPace(0.022, MOST)
    for number in (1, 8, 60, 64):
        pace.note(number, number, seconds_of(number))
        assert run(pace, number, 10)[-1] == 256


def test_without_a_target_a_step_takes_three_without_prompts_or_20_ms() -> None:
    quick, slow = StepPace(None, MOST), StepPace(None, MOST)
    for _ in range(50):
        quick.note(64, 64, 0.006)
        slow.note(64, 64, 0.016)
    assert quick.target == 0.02
    assert slow.target == pytest.approx(0.0464)
    assert run(quick, 64, 20)[-1] == longest(0.02) == 128
    assert run(slow, 64, 20)[-1] == longest(0.0464) == 512


def test_without_a_target_what_waits_is_read_in_four_steps() -> None:
    free, held = StepPace(None, MOST), StepPace(0.03, MOST)
    for pace in (free, held):
        for _ in range(50):
            pace.note(64, 64, 0.0112)
        run(pace, 64, 20)
    assert free.room(64) == held.room(64) == 256
    assert free.room(64, 4 * 300) == 256, "it has room for a quarter of that"
    assert free.room(64, 4 * 450) == 512
    assert free.room(64, 4000) == 1024
    assert free.room(64, 100_000) == MOST
    assert held.room(64, 4000) == 256, "who names a target has it"
    # A step that was to be longer is no reason to read less in those that follow.
    for _ in range(5):
        free.note(1024, 64, seconds_of(1024))
    assert free.room(64) == 256


def gaps_of_load(pace: StepPace, prompt: int, output: int) -> tuple[float, list[float]]:
    """Tokens a second, and all gaps between tokens, of 64 streams with five answers each."""
    chance = random.Random(0)
    left = [
        [max(round(size * chance.uniform(0.5, 1.5)), 1) for size in (prompt, output)]
        for _ in range(320)
    ]
    running, gaps, now, num_tokens = [left.pop() for _ in range(64)], list[float](), 0.0, 0
    while running:
        answering = [one for one in running if not one[0]]
        pending = sum(one[0] for one in running)
        room = pace.room(len(answering), pending) - len(answering)
        num_read = 0
        for one in running:
            num = min(one[0], room - num_read)
            one[0] -= num
            num_read += num
        total = num_read + len(answering)
        seconds = 0.0085 * bool(answering)
        if num_read:
            seconds += 0.004 + 4e-5 * bucket(total, MOST)
        now += seconds
        pace.note(total, len(answering), seconds)
        gaps += [seconds] * len(answering)
        num_tokens += len(answering)
        for one in answering:
            one[1] -= 1
        running = [one for one in running if one[0] or one[1]]
        running += [left.pop() for _ in range(min(64 - len(running), len(left)))]
    return num_tokens / now, sorted(gaps)


@pytest.mark.parametrize(("prompt", "output"), [(256, 128), (64, 256), (1000, 64), (2000, 200)])
def test_gaps_are_even_and_little_is_lost_for_that(prompt: int, output: int) -> None:
    """By the times of an 8B on an H200, roughly; where prompts are most of the work, few tokens are
    lost, and where they are not, the longest gaps are a few times the usual one."""
    whole, _ = gaps_of_load(StepPace(60.0, MOST), prompt, output)
    rate, gaps = gaps_of_load(StepPace(None, MOST), prompt, output)
    assert rate > 0.9 * whole
    if prompt <= 256:
        assert gaps[int(0.99 * len(gaps))] < 3.5 * gaps[len(gaps) // 2]


def test_where_nobody_answers_a_step_is_whole() -> None:
    pace = StepPace(0.001, MOST)
    assert run(pace, 0, 3) == [MOST] * 3


@pytest.mark.parametrize("num_generating", [1, 64, 200])
def test_prompts_never_starve(num_generating: int) -> None:
    pace = StepPace(0.001, MOST)  # nothing is as quick
    assert run(pace, num_generating, 10)[-1] >= num_generating + 64
    assert run(pace, num_generating, 1)[-1] <= 2 * (num_generating + 64)


def test_one_slow_step_changes_nothing_for_long() -> None:
    pace = StepPace(0.03, MOST)
    pace.note(8, 8, 0.008)
    before = run(pace, 8, 20)[-1]
    pace.note(before, 8, 0.4)  # a plan was made
    assert run(pace, 8, 6)[-1] == before
    for _ in range(20):
        pace.note(before, 8, 0.4)
    assert run(pace, 8, 6)[-1] < before
    for _ in range(2):
        for _ in range(1000):
            pace.note(8, 8, 0.008)
        after = run(pace, 8, 20)[-1]
    assert after == before, "it was tried again"


def test_a_machine_that_becomes_slower_gets_shorter_steps() -> None:
    pace = StepPace(0.04, MOST)
    pace.note(8, 8, seconds_of(8))
    assert run(pace, 8, 20)[-1] == 512
    assert run(pace, 8, 40, per_token=2e-4)[-1] == longest(0.04, 2e-4) == 128


def test_the_scheduler_cuts_prompts_and_reads_all_of_them() -> None:
    pace = StepPace(0.02, 512)
    scheduler = Scheduler(KVCache(400, 16), max_batch_tokens=512, max_batch_requests=8, pace=pace)
    chance = random.Random(0)
    requests = [make_request(number, chance.choice((1, 90, 700))) for number in range(8)]
    for request in requests[:4]:
        scheduler.add(request)
    longest_step = 0.0
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
            longest_step = max(longest_step, seconds_of(total))
            assert total <= pace.room(generating, MOST)
        pace.note(total, generating, seconds_of(total))
        for chunk in chunks:
            chunk.request.advance(chunk.num_tokens)
            if chunk.samples:
                chunk.request.accept(7)
            if chunk.request.done:
                scheduler.remove(chunk.request)
    assert all(request.done for request in requests)
    # What is tried first, before a step has told anything.
    assert 0 < longest_step <= seconds_of(256)
