"""The engine on a fake runner: what a request yields does not depend on the company it keeps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pretended.fake_runner import (
    END_ID,
    FAULT_ID,
    POISON_ID,
    VOCAB_SIZE,
    FakeDetokenizer,
    batches_of,
    expected_output,
    fake_engine,
    hashed_logits,
)

from hypocenter.base.errors import BadLogits, ContextOverflow, HypoError, OutOfBlocks, UsageError
from hypocenter.base.results import Completion, Delta
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.answer_text import StopStrings
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.record.recorder import current
from hypocenter.settings.config import SamplingParams

RANDOM = SamplingParams(max_tokens=20, temperature=0.8, seed=11, ignore_eos=True)


def drive(engine: Engine, limit: int = 5000) -> None:
    """Step until there is nothing left to do, with every invariant checked after each step."""
    for _ in range(limit):
        num_tokens = engine.step()
        engine.check_integrity()
        if num_tokens == 0:
            return
    raise AssertionError(f"still busy after {limit} steps")


def submit(engine: Engine, prompt: list[int], params: SamplingParams = RANDOM) -> Request:
    request = engine.request(prompt, params)
    engine.submit(request)
    return request


def complete(engine: Engine, prompt: list[int], **params: Any) -> Completion:
    return engine.complete([engine.request(prompt, SamplingParams(**params))])[0]


def text_of(token_ids: list[int]) -> str:
    return "".join(map(FakeDetokenizer().push, token_ids))


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([0, 1, 3, 12, None]),
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([0.8, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 1 << 40),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0]),
)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go and are cancelled at any time; each yields what it would yield alone."""

    runs_ahead = False

    def __init__(self) -> None:
        super().__init__()
        # Small enough that requests push each other out; the last ones do not fit at all.
        self.engine = fake_engine(
            num_blocks=11, block_size=4, context_length=40, max_batch_tokens=9,
            max_batch_requests=4, runs_ahead=self.runs_ahead,
        )  # fmt: skip
        self.requests: list[Request] = []
        self.cancelled: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(1, POISON_ID - 1), min_size=1, max_size=40),
        params=PARAMS,
        keeps_logits=st.sampled_from([False, False, False, True]),
    )
    def submit(self, prompt: list[int], params: SamplingParams, keeps_logits: bool) -> None:
        request = self.engine.request(prompt, params, RequestTerms(keeps_logits=keeps_logits))
        self.engine.submit(request)
        self.requests.append(request)

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            self.engine.check_integrity()

    @precondition(lambda self: any(not request.done for request in self.requests))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if not r.done]))
        self.engine.cancel(request)
        self.cancelled.add(request.id)
        assert request.done

    @invariant()
    def whole(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        drive(self.engine)
        assert self.engine.cache.num_free_blocks == self.engine.cache.num_blocks
        for request in self.requests:
            assert request.done
            assert request.error is None
            is_asked = request.params.logprobs is not None
            assert len(request.logprobs) == is_asked * len(request.output_ids)
            if request.keeps_logits and request.id not in self.cancelled:
                prompt = list(request.prompt_ids)
                alone = [hashed_logits(prompt[: n + 1]) for n in range(len(prompt))]
                assert np.array_equal(np.concatenate(request.logits), np.stack(alone))
            elif not request.keeps_logits:
                self.check_output(request)

    def check_output(self, request: Request) -> None:
        params = request.params
        alone = expected_output(request.prompt_ids, params, 40, end=not params.ignore_eos)
        if request.finish_reason == "cancelled":
            assert request.output_ids == alone[: len(request.output_ids)]
            return
        assert request.output_ids == alone
        ended = not params.ignore_eos and alone[-1:] == [END_ID]
        assert request.finish_reason == ("stop" if ended else "length")
        shown = alone[:-1] if ended else alone
        assert "".join(delta.text for delta in request.deltas) == text_of(shown)
        assert [token for delta in request.deltas for token in delta.token_ids] == alone


class AheadMachine(EngineMachine):
    """The same where steps are launched before those before them are settled."""

    runs_ahead = True


TestEngineInAnyOrder = EngineMachine.TestCase
TestEngineAheadInAnyOrder = AheadMachine.TestCase
TestEngineInAnyOrder.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestEngineAheadInAnyOrder.settings = TestEngineInAnyOrder.settings


def test_a_request_yields_the_same_alone_and_in_any_company() -> None:
    prompts = [[7], [7, 8, 9], [7] * 30, [3, 1, 4, 1, 5], [9] * 17]
    alone = [
        complete(fake_engine(), prompt, max_tokens=9, temperature=1.0, seed=0) for prompt in prompts
    ]
    engine = fake_engine(num_blocks=14)
    requests = [
        engine.request(prompt, SamplingParams(max_tokens=9, temperature=1.0, seed=0))
        for prompt in prompts
    ]
    together = engine.complete(requests)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert any(request.num_preemptions for request in requests)
    assert max(len(batch.block_tables) for batch in batches_of(engine)) > 2


@pytest.mark.parametrize("num_kept", [0, 1, 7, 19])
def test_a_resumed_request_continues_identically(num_kept: int) -> None:
    prompt = [5, 6, 7]
    whole = complete(fake_engine(), prompt, max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    resumed = complete(
        fake_engine(),
        prompt + list(whole.token_ids[:num_kept]),
        max_tokens=20 - num_kept,
        temperature=0.8,
        seed=3,
        ignore_eos=True,
    )
    assert len(whole.token_ids) == 20
    assert resumed.token_ids == whole.token_ids[num_kept:]


def test_penalties_count_prompt_and_output_as_they_should() -> None:
    # Rewarded instead of punished, tokens repeat, and every count weighs.
    for params in (
        SamplingParams(max_tokens=30, frequency_penalty=-0.4, ignore_eos=True),
        SamplingParams(max_tokens=30, presence_penalty=-1.0, ignore_eos=True),
        SamplingParams(max_tokens=30, repeat_penalty=0.6, ignore_eos=True),
    ):
        engine = fake_engine()
        prompt = [1, 2, 3, 3, 3]
        (completion,) = engine.complete([engine.request(prompt, params)])
        assert list(completion.token_ids) == expected_output(prompt, params, 128, end=False)
        assert len(set(completion.token_ids)) < 25


def test_the_seed_matters() -> None:
    outputs = {
        complete(fake_engine(), [5], max_tokens=8, temperature=1.0, seed=seed).token_ids
        for seed in range(5)
    }
    assert len(outputs) == 5


def test_a_long_prompt_runs_in_chunks_of_the_budget() -> None:
    engine = fake_engine(max_batch_tokens=16)
    complete(engine, list(range(1, 41)), max_tokens=2, ignore_eos=True)
    assert [len(batch.token_ids) for batch in batches_of(engine)] == [16, 16, 8, 1]
    assert [len(batch.logit_rows) for batch in batches_of(engine)] == [0, 0, 1, 1]


def test_end_token_ends_without_its_text_and_ignore_eos_goes_on() -> None:
    ended = complete(fake_engine(), [1, 2, 4], max_tokens=None, temperature=2.0, seed=0)
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == END_ID
    assert ended.text == text_of(list(ended.token_ids[:-1]))
    on = complete(
        fake_engine(), [1, 2, 4], max_tokens=None, temperature=2.0, seed=0, ignore_eos=True
    )
    assert on.finish_reason == "length"
    assert on.token_ids[: len(ended.token_ids)] == ended.token_ids
    assert END_ID in on.token_ids


def test_a_full_context_ends_with_length() -> None:
    engine = fake_engine(context_length=10)
    completion = complete(engine, [1, 2, 3], max_tokens=None, ignore_eos=True)
    assert completion.finish_reason == "length"
    assert len(completion.token_ids) == 7
    assert max(batch.positions.max() for batch in batches_of(engine)) == 8
    full = complete(engine, [1] * 10, max_tokens=5)
    assert (full.finish_reason, full.token_ids, full.text) == ("length", (), "")


def test_no_tokens_asked_for_runs_nothing() -> None:
    engine = fake_engine()
    assert complete(engine, [1], max_tokens=0).finish_reason == "length"
    assert batches_of(engine) == []


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], UsageError, "the prompt has no tokens"),
        (
            [1] * 129,
            ContextOverflow,
            "maximum context length is 128 tokens, but the prompt has 129",
        ),
        ([1] * 81, OutOfBlocks, "21 blocks needed, but 20 of 20 are free"),
        ([1, VOCAB_SIZE], UsageError, "prompt token 1 is 61, but the vocabulary has 61"),
        ([-1], UsageError, "prompt token 0 is -1, but the vocabulary has 61"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(
    prompt: list[int], error: type[HypoError], message: str
) -> None:
    with pytest.raises(error, match=message):
        fake_engine(num_blocks=20).request(prompt, RANDOM)


def test_a_cache_too_small_for_the_answer_fails_that_request_only() -> None:
    engine = fake_engine(num_blocks=4, max_batch_requests=2)
    greedy = submit(engine, [1, 2], SamplingParams(max_tokens=None, ignore_eos=True))
    modest = submit(engine, [3], SamplingParams(max_tokens=10, ignore_eos=True))
    drive(engine)
    assert isinstance(greedy.error, OutOfBlocks)
    assert len(greedy.output_ids) == 4 * 4 - 2 + 1
    assert modest.output_ids == expected_output([3], modest.params, 128, end=False)


def test_nan_fails_the_request_and_not_its_neighbours() -> None:
    engine = fake_engine()
    good, bad, also_good = (submit(engine, prompt) for prompt in ([1, 2], [POISON_ID, 2], [3]))
    drive(engine)
    assert isinstance(bad.error, BadLogits)
    assert (bad.error.row, bad.error.num_bad) == (1, 2)
    for request in (good, also_good):
        assert request.error is None
        prompt = list(request.prompt_ids)
        assert request.output_ids == expected_output(prompt, RANDOM, 128, end=False)
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_a_failing_step_ends_those_that_were_in_it_and_the_engine_goes_on() -> None:
    engine = fake_engine(max_batch_requests=1)
    bad, good = submit(engine, [FAULT_ID]), submit(engine, [2])
    drive(engine)
    assert str(bad.error) == "the device is on fire"
    assert good.error is None
    assert good.output_ids == expected_output([2], RANDOM, 128, end=False)


def test_a_failing_detokenizer_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    bad, good = submit(engine, [1, 2]), submit(engine, [3])

    def refuse(token_id: int, *, may_end: bool) -> str:
        raise ValueError(f"no text for {token_id}")

    monkeypatch.setattr(bad._text, "push", refuse)
    drive(engine)
    assert isinstance(bad.error, ValueError)
    assert good.output_ids == expected_output([3], RANDOM, 128, end=False)


def test_an_interrupted_step_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    requests = [submit(engine, prompt) for prompt in ([1, 2, 3], [4, 5])]
    for _ in range(3):
        engine.step()
    reading = engine.request(list(range(1, 31)), RANDOM, RequestTerms(keeps_logits=True))
    engine.submit(reading)
    engine.step()
    assert len(reading.logits) == 1
    run = engine.runner.run

    def interrupted(batch: Any) -> Any:
        run(batch)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check_integrity()
    monkeypatch.setattr(engine.runner, "run", run)
    drive(engine)
    for request in requests:
        prompt = list(request.prompt_ids)
        assert request.output_ids == expected_output(prompt, RANDOM, 128, end=False)
    alone = np.stack([hashed_logits(list(range(1, n + 1))) for n in range(1, 31)])
    assert np.array_equal(np.concatenate(reading.logits), alone)


def test_what_ended_before_an_interruption_does_not_run_again() -> None:
    engine = fake_engine()
    ending, going_on = submit(engine, [1, 2, 3]), submit(engine, [4])

    def interrupt() -> None:
        if ending.done:
            raise KeyboardInterrupt

    ending.on_news = interrupt
    with pytest.raises(KeyboardInterrupt):
        drive(engine)
    assert ending.done
    engine.check_integrity()
    drive(engine)
    assert ending.output_ids == expected_output([1, 2, 3], RANDOM, 128, end=False)
    assert going_on.output_ids == expected_output([4], RANDOM, 128, end=False)


def test_cancel_ends_with_what_there_is() -> None:
    engine = fake_engine()
    request, waiting = submit(engine, [1, 2, 3]), submit(engine, [4])
    for _ in range(6):
        engine.step()
    engine.cancel(request)
    whole = expected_output([1, 2, 3], RANDOM, 128, end=False)
    assert request.finish_reason == "cancelled"
    assert request.output_ids == whole[:6]
    assert [delta.finish_reason for delta in request.deltas][-2:] == [None, "cancelled"]
    engine.cancel(request)
    drive(engine)
    assert waiting.output_ids == expected_output([4], RANDOM, 128, end=False)
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_a_stream_left_early_is_cancelled() -> None:
    engine = fake_engine()
    request = engine.request([1, 2, 3], RANDOM)
    stream = engine.follow(request)
    pieces = [next(stream), next(stream)]
    stream.close()
    assert request.finish_reason == "cancelled"
    assert engine.step() == 0
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    assert [piece.token_ids for piece in pieces] == [(token,) for token in request.output_ids[:2]]


def collect(engine: Engine, request: Request) -> tuple[list[Delta], Completion]:
    pieces = []
    stream = engine.follow(request)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def test_a_stream_is_the_completion_in_pieces() -> None:
    pieces, completion = collect(fake_engine(), fake_engine().request([1, 2, 3], RANDOM))
    assert "".join(piece.text for piece in pieces) == completion.text
    assert [token for piece in pieces for token in piece.token_ids] == list(completion.token_ids)
    assert [piece.finish_reason for piece in pieces] == [None] * 19 + ["length"]
    assert completion.timings.num_prompt_tokens == 3
    assert completion.timings.num_generated_tokens == 20
    assert completion.timings.prompt_seconds > 0
    assert completion.timings.generation_seconds > 0
    assert completion.route.kernels == ("fake",)


def test_many_threads_drive_their_own_requests() -> None:
    engine = fake_engine(num_blocks=20, max_batch_requests=4)
    found: dict[int, Any] = {}

    def follow(number: int) -> None:
        prompt = [number + 1] * (number + 1)
        try:
            found[number] = collect(engine, engine.request(prompt, RANDOM))[1].token_ids
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(12):
        prompt = [number + 1] * (number + 1)
        assert found[number] == tuple(expected_output(prompt, RANDOM, 128, end=False))
    engine.check_integrity()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


class NotedTurns(threading.Condition):
    """Says when the thread that made it begins to wait for the end of a turn."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.waits = threading.Event()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        if threading.get_ident() == self._thread:
            self.waits.set()
        return super().wait_for(predicate, timeout)


def test_a_busy_thread_does_not_keep_another_from_its_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever waits gets to its pieces after each turn, though the lock is taken again at once.

    The busy thread ends a step only once the other one waits for that: for the lock it would wait
    in vain.
    """
    engine = fake_engine(context_length=250)
    turns = NotedTurns()
    monkeypatch.setattr(engine, "_turn_ended", turns)
    long = engine.request([1], SamplingParams(max_tokens=None, ignore_eos=True))
    short = engine.request([2], SamplingParams(max_tokens=5, ignore_eos=True))
    is_within, may_begin, is_through = threading.Event(), threading.Event(), threading.Event()
    came: list[bool] = []
    run = engine.runner.run

    def run_until_the_other_waits(batch: Any) -> Any:
        if threading.current_thread() is busy:
            is_within.set()
            came.append(may_begin.wait(30))
            if not is_through.is_set():
                came.append(turns.waits.wait(30))
                turns.waits.clear()
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", run_until_the_other_waits)
    busy = threading.Thread(target=lambda: collect(engine, long))
    busy.start()
    assert is_within.wait(30)
    may_begin.set()
    progress = [len(long.output_ids) for _ in engine.follow(short)]
    is_through.set()
    turns.waits.set()
    busy.join(60)
    assert not busy.is_alive()
    assert all(came)
    assert len(came) > 250
    assert len(progress) == 5
    # A step of its own may lie between two of these, and none that it could not have taken.
    assert max(then - now for now, then in itertools.pairwise(progress)) <= 3


def test_closing_fails_what_is_open_and_what_comes() -> None:
    engine = fake_engine()
    request = submit(engine, [1])
    engine.step()
    late = engine.request([2], RANDOM)
    engine.close()
    assert isinstance(request.error, UsageError)
    with pytest.raises(UsageError, match="closed"):
        engine.complete([late])
    with pytest.raises(UsageError, match="closed"):
        engine.request([1], RANDOM)
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def by_characters(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The oracle: the text before the stop string that is complete first, the longest of these."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=8),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple),
)
def test_stop_strings_are_found_wherever_the_pieces_break(
    pieces: list[str], stop: tuple[str, ...]
) -> None:
    strings = StopStrings(stop)
    sent, text, stopped = "", "", False
    wanted, wanted_stop = by_characters("".join(pieces), stop)
    for piece in pieces:
        text += piece
        more, stopped = strings.push(piece)
        sent += more
        assert wanted.startswith(sent)
        if stopped:
            break
        # What is held back is no longer than it must be.
        held = text[len(sent) :]
        assert held == "" or any(string.startswith(held) for string in stop)
    if not stopped:
        sent += strings.flush()
    assert (sent, stopped) == (wanted, wanted_stop)


def stopped_at(make: Callable[[str], tuple[str, ...]]) -> tuple[str, list[Delta], Completion]:
    """The text without stop strings, and pieces and completion with those that `make` takes."""
    params = {"max_tokens": 20, "temperature": 1.0, "seed": 0, "ignore_eos": True}
    text = complete(fake_engine(), [1, 2], **params).text
    engine = fake_engine()
    request = engine.request([1, 2], SamplingParams(**params, stop=make(text)))  # type: ignore[arg-type]
    return text, *collect(engine, request)


def test_a_stop_string_across_tokens_ends_the_answer_before_it() -> None:
    text, pieces, completion = stopped_at(lambda text: ("never", text[8:11]))
    assert completion.finish_reason == "stop"
    assert completion.text == text[:8]
    assert len(completion.token_ids) == 11
    assert "".join(piece.text for piece in pieces) == text[:8]
    assert [token for piece in pieces for token in piece.token_ids] == list(completion.token_ids)


def test_a_stop_string_that_does_not_come_true_is_sent_after_all() -> None:
    text, _, completion = stopped_at(lambda text: (text[18:] + "!", text[8:10] + "!"))
    assert completion.finish_reason == "length"
    assert completion.text == text


def test_an_error_behind_the_end_of_every_request_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = fake_engine()
    recorded: list[BaseException] = []

    def fail(*_: Any) -> None:
        raise HypoError("the disk is full")

    monkeypatch.setattr(engine._steps, "record_ids", fail)  # comes when the step is settled
    # Whether this process records depends on what ran in it before.
    monkeypatch.setattr(
        type(current()), "record_failure", lambda self, error, *_: recorded.append(error)
    )
    request = submit(engine, [3, 5], SamplingParams(max_tokens=1, temperature=0.0))
    engine.step()
    assert request.done
    assert request.error is None
    assert [str(error) for error in recorded] == ["the disk is full"]
    assert "when its requests had all ended: the disk is full" in caplog.text
