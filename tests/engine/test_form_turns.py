"""Whose turn it is when masks take long: others step as before, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import cast

import pytest
from test_scheduler import add, make_scheduler, step

from hypocenter import LLM, SamplingParams
from hypocenter.engine.batch import Chunk
from hypocenter.engine.form_turns import SLOW_SECONDS, STEP_SECONDS, FormTurns
from hypocenter.engine.grammar import MaskCost, Matcher
from hypocenter.engine.request import Request
from hypocenter.engine.scheduler import Scheduler


@dataclass
class Asking:
    id: int
    mask_seconds: float
    num_pending: int = 1
    form_turn: int = 0


def requests(*seconds: float) -> list[Request]:
    return [cast(Request, Asking(number, one)) for number, one in enumerate(seconds)]


def ids(turns: FormTurns, asking: list[Request]) -> list[int]:
    return [request.id for request in turns.take_turns(asking, 100)]


def test_ordinary_forms_always_step() -> None:
    turns = FormTurns()
    many = requests(*[SLOW_SECONDS] * 500)
    assert ids(turns, many) == list(range(500))
    few = requests(STEP_SECONDS / 2, 0.0, STEP_SECONDS / 2)
    assert ids(turns, few) == [0, 1, 2]


def test_slow_forms_take_turns_and_others_step_each_time() -> None:
    turns = FormTurns()
    asking = requests(0.0, *[STEP_SECONDS / 2] * 5, 0.0, 10 * STEP_SECONDS)
    steps = [ids(turns, asking) for _ in range(12)]
    assert steps[:4] == [[0, 1, 2, 6], [0, 3, 4, 6], [0, 5, 6], [0, 6, 7]]
    seen = Counter(number for step in steps for number in step)
    assert (seen[0], seen[6]) == (12, 12)
    assert all(seen[number] == 3 for number in (1, 2, 3, 4, 5, 7))


def test_who_comes_later_waits_no_longer_than_the_others() -> None:
    turns = FormTurns()
    first = requests(*[STEP_SECONDS] * 3)
    assert [ids(turns, first) for _ in range(2)] == [[0], [1]]
    later = [*first, *requests(*[STEP_SECONDS] * 4)[3:]]
    assert [ids(turns, later) for _ in range(4)] == [[2], [3], [0], [1]]


def test_two_kinds_of_texts_that_step_by_turns_wait_no_longer() -> None:
    turns = FormTurns()
    long, short = requests(*[STEP_SECONDS] * 3), requests(0.0, *[STEP_SECONDS] * 2)
    steps = [(ids(turns, long), ids(turns, short)) for _ in range(3)]
    assert steps == [([0], [0, 1]), ([1], [0, 2]), ([2], [0, 1])]


def test_a_prompt_that_needs_no_mask_yet_is_read_in_each_step() -> None:
    turns = FormTurns()
    asking = [*requests(*[STEP_SECONDS] * 3), cast(Request, Asking(3, STEP_SECONDS, 101))]
    assert [ids(turns, asking) for _ in range(3)] == [[0, 3], [1, 3], [2, 3]]


def test_a_step_runs_where_the_one_whose_turn_it_is_finds_no_room() -> None:
    """Those that sit out hold the blocks, and older ones give up none for it."""
    scheduler = make_scheduler(num_blocks=4, max_batch_tokens=20)
    first, second = add(scheduler, [8, 4])
    assert len(step(scheduler)) == 2
    assert step(scheduler) == [(0, 8, 9)]  # the last block is his
    for request, turn in ((first, 2), (second, 1)):
        request.form_turn = turn
        request.matcher = cast(Matcher, SlowForm())
    assert [chunk[0] for chunk in step(scheduler)] == [0]


class SlowForm:
    cost = MaskCost(STEP_SECONDS)

    def accept(self, token_id: int) -> bool:
        return False


def test_what_a_mask_may_take_is_forgotten_by_and_by() -> None:
    cost = MaskCost()
    cost.note(0.5)
    cost.note(0.001)
    assert 0.4 < cost.seconds < 0.5
    for _ in range(100):
        cost.note(0.001)
    assert cost.seconds == pytest.approx(0.001, rel=0.1)


def test_answers_are_the_same_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    warm = SamplingParams(temperature=1.0, max_tokens=12)
    params = [replace(warm, seed=seed, json_schema=form if seed % 4 else None) for seed in range(8)]
    steps: list[list[Chunk]] = []
    schedule = Scheduler.schedule

    def seen(scheduler: Scheduler) -> list[Chunk]:
        steps.append(schedule(scheduler))
        return steps[-1]

    with LLM(num_threads=1, context_length=256) as llm:
        together = [one.token_ids for one in llm.generate(["x = "] * 8, params)]
        monkeypatch.setattr(Scheduler, "schedule", seen)
        monkeypatch.setattr(MaskCost, "note", lambda cost, seconds: None)
        monkeypatch.setattr(MaskCost, "seconds", STEP_SECONDS, raising=False)
        assert [one.token_ids for one in llm.generate(["x = "] * 8, params)] == together
    held = [sum(chunk.request.matcher is not None for chunk in step) for step in steps]
    assert max(held) == 1
    assert sum(held) > 12


def test_drafts_take_a_mask_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step may take counts the drafts that the step before had."""
    seen: list[tuple[int, float]] = []
    with_drafts = Scheduler.with_drafts
    monkeypatch.setattr(MaskCost, "note", lambda cost, seconds: setattr(cost, "seconds", 1.0))

    def noted(scheduler: Scheduler, chunks: list[Chunk]) -> list[Chunk]:
        chunks = with_drafts(scheduler, chunks)
        seen.extend((len(chunk.drafts), chunk.request.mask_seconds) for chunk in chunks)
        return chunks

    monkeypatch.setattr(Scheduler, "with_drafts", noted)
    with LLM(num_threads=1, context_length=256, spec="ngram") as llm:
        params = SamplingParams(max_tokens=40, regex="(a = 12345; ){9}")
        llm.generate(["a = 12345; a = 12345; "], [params])
    assert any(num_drafts > 1 for num_drafts, _ in seen)
    assert all(seconds >= 1 + num_drafts for num_drafts, seconds in seen if seconds)
    assert (0, 1.0) in seen
