"""One thread steps for requests from anywhere: it comes, tells, and goes when nobody waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pretended.fake_runner import FAULT_ID, batches_of, expected_output, fake_engine

from hypocenter.base.errors import HypoError, UsageError
from hypocenter.engine.driver import Driver
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.settings.config import SamplingParams

RANDOM = SamplingParams(max_tokens=20, temperature=0.8, seed=11, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
DEADLINE_SECONDS = 30.0


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)


def ignore() -> None:
    """News that nobody waits for."""


def telling(request: Request, ended: threading.Event) -> Callable[[], None]:
    """What sets `ended` when the request is done."""

    def tell() -> None:
        if request.done:
            ended.set()

    return tell


def driving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hypocenter driver"]


def check_empty(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    assert engine.step() == 0


def long_engine() -> Engine:
    """One in which an endless request takes a while."""
    return fake_engine(num_blocks=2000, context_length=8000)


def test_requests_from_many_threads_share_one_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine(num_blocks=20, max_batch_requests=4)
    driver = Driver(engine)
    step = engine.step
    all_submitted = threading.Event()

    def step_once_all_are_there() -> int:
        assert all_submitted.wait(DEADLINE_SECONDS)
        return step()

    monkeypatch.setattr(engine, "step", step_once_all_are_there)
    requests = [engine.request([number + 1] * (number + 1), RANDOM) for number in range(12)]
    num_driving: list[int] = []
    ended = [threading.Event() for _ in requests]

    def submit(number: int) -> None:
        def tell() -> None:
            num_driving.append(len(driving_threads()))
            if requests[number].done:
                ended[number].set()

        driver.submit(requests[number], tell)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    all_submitted.set()
    for event in ended:
        assert event.wait(DEADLINE_SECONDS)
    driver.join()
    assert set(num_driving) == {1}
    assert driving_threads() == []
    for request in requests:
        assert request.output_ids == expected_output(request.prompt_ids, RANDOM, 128, end=False)
        assert engine.result(request).token_ids == tuple(request.output_ids)
    assert max(len(batch.block_tables) for batch in batches_of(engine)) > 2
    monkeypatch.undo()
    check_empty(engine)


def test_each_piece_is_told_of_when_it_is_there() -> None:
    engine = fake_engine()
    driver = Driver(engine)
    request = engine.request([1, 2, 3], RANDOM)
    seen: list[tuple[int, bool]] = []
    driver.submit(request, lambda: seen.append((len(request.deltas), request.done)))
    driver.join()
    assert seen == [(number, number == 20) for number in range(1, 21)]


def test_it_begins_anew_after_the_last_request() -> None:
    engine = fake_engine()
    driver = Driver(engine)
    for prompt in ([1], [2], [3]):
        request = engine.request(prompt, RANDOM)
        driver.submit(request, ignore)
        driver.join()
        assert request.done
        assert driving_threads() == []


def test_a_cancelled_request_ends_before_the_next_step() -> None:
    engine = long_engine()
    driver = Driver(engine)
    request, other = engine.request([1], ENDLESS), engine.request([2], RANDOM)
    driver.submit(request, ignore)
    driver.submit(other, ignore)
    wait_until(lambda: len(request.output_ids) > 3)
    driver.cancel(request)
    num_then = len(request.output_ids)
    driver.join()
    assert request.finish_reason == "cancelled"
    assert len(request.output_ids) <= num_then + 1
    assert other.output_ids == expected_output([2], RANDOM, 8000, end=False)
    check_empty(engine)


def test_a_fault_of_a_step_is_told() -> None:
    engine = fake_engine(max_batch_requests=1)
    driver = Driver(engine)
    bad, good = engine.request([FAULT_ID], RANDOM), engine.request([2], RANDOM)
    told: list[Request] = []
    for request in (bad, good):
        driver.submit(request, lambda request=request: told.append(request))  # type: ignore[misc]
    driver.join()
    assert told[0] is bad
    with pytest.raises(RuntimeError, match="on fire"):
        engine.result(bad)
    assert good.output_ids == expected_output([2], RANDOM, 128, end=False)


def test_a_fault_of_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    driver = Driver(engine)
    schedule = engine.scheduler.schedule
    ends: list[Request] = []

    def failing() -> Any:
        if not ends and engine.scheduler.running:
            raise ZeroDivisionError("a bug")
        return schedule()

    monkeypatch.setattr(engine.scheduler, "schedule", failing)
    request = engine.request([1, 2], RANDOM)
    driver.submit(request, lambda: ends.append(request) if request.done else None)
    driver.join()
    with pytest.raises(ZeroDivisionError, match="a bug"):
        engine.result(request)
    later = engine.request([3], RANDOM)
    driver.submit(later, ignore)
    driver.join()
    assert later.output_ids == expected_output([3], RANDOM, 128, end=False)
    check_empty(engine)


def test_what_failed_before_it_was_admitted_never_runs() -> None:
    engine = fake_engine()
    request = engine.request([1], RANDOM)
    engine.submit(request)
    engine.fail([request], ZeroDivisionError("a bug"))
    check_empty(engine)
    assert batches_of(engine) == []


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit])
@pytest.mark.parametrize("num_heard", [1, 4, 20])
def test_a_callback_that_raises_ends_its_own_request(
    raised: type[BaseException], num_heard: int
) -> None:
    engine = fake_engine()
    driver = Driver(engine)
    bad, good, late = (engine.request([number], RANDOM) for number in (1, 2, 3))
    heard: list[bool] = []

    def fail() -> None:
        heard.append(bad.done)
        if len(heard) == num_heard:
            raise raised("in a callback")

    driver.submit(bad, fail)
    driver.submit(good, ignore)
    driver.join()
    driver.submit(late, ignore)
    driver.join()
    with pytest.raises(ZeroDivisionError if raised is ZeroDivisionError else HypoError) as caught:
        engine.result(bad)
    assert raised in (type(caught.value), type(caught.value.__cause__))
    # Where it could not be told of a piece, it is still told of the end.
    assert heard == [False] * min(num_heard, 19) + [True]
    for other in (good, late):
        assert other.output_ids == expected_output(other.prompt_ids, RANDOM, 128, end=False)
    check_empty(engine)


def test_a_callback_that_always_raises_ends_its_request_however_that_ends() -> None:
    engine = long_engine()
    driver = Driver(engine)
    begun = threading.Event()

    def fail() -> None:
        begun.set()
        raise ZeroDivisionError("in a callback")

    for prompt in ([1], [FAULT_ID]):
        request = engine.request(prompt, ENDLESS)
        driver.submit(request, fail)
        driver.join()
        assert begun.is_set()
        assert request.done
    with pytest.raises(RuntimeError, match="on fire") as caught:
        engine.result(request)
    assert "in a callback" in caught.value.__notes__[0]
    check_empty(engine)


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_whatever_a_step_raises_leaves_nobody_waiting(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine()
    driver = Driver(engine)
    step = engine.step
    both_there = threading.Event()

    def end() -> int:
        assert both_there.wait(DEADLINE_SECONDS)
        step()
        raise raised

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", end)
        requests = [engine.request([number], RANDOM) for number in (1, 2)]
        ended = {request: threading.Event() for request in requests}
        for request in requests:
            driver.submit(request, telling(request, ended[request]))
        both_there.set()
        for request in requests:
            assert ended[request].wait(DEADLINE_SECONDS)
            wanted = raised if issubclass(raised, Exception) else HypoError
            with pytest.raises(wanted) as caught:
                engine.result(request)
            assert raised in (type(caught.value), type(caught.value.__cause__))
        driver.join()
    later = engine.request([3], RANDOM)
    driver.submit(later, ignore)
    driver.join()
    assert later.output_ids == expected_output([3], RANDOM, 128, end=False)
    check_empty(engine)


def test_an_engine_that_can_end_nothing_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = fake_engine()
    driver = Driver(engine)

    def fail(*values: object, **named: object) -> Any:
        raise ZeroDivisionError("a broken table")

    monkeypatch.setattr(engine.scheduler, "schedule", fail)
    monkeypatch.setattr(engine.scheduler, "remove", fail)
    request = engine.request([1], RANDOM)
    driver.submit(request, ignore)
    driver.join()
    with pytest.raises(ZeroDivisionError, match="a broken table") as caught:
        engine.result(request)
    assert "a broken table" in caught.value.__notes__[0]


@pytest.mark.parametrize("what", ["step", "complete", "close", "check_integrity"])
def test_a_callback_that_asks_the_engine_does_not_wait_for_itself(what: str) -> None:
    engine = fake_engine()
    driver = Driver(engine)
    bad, good = engine.request([1], RANDOM), engine.request([2], RANDOM)
    given: list[Any] = [[engine.request([3], RANDOM)]] if what == "complete" else []
    driver.submit(bad, lambda: getattr(engine, what)(*given))
    driver.submit(good, ignore)
    driver.join()
    with pytest.raises(UsageError, match="asked within its own step"):
        engine.result(bad)
    assert good.output_ids == expected_output([2], RANDOM, 128, end=False)


def test_a_stream_that_is_forgotten_within_a_step_ends_with_the_next() -> None:
    engine = long_engine()
    request = engine.request([1], ENDLESS)
    streams = [engine.follow(request)]
    next(streams[0])
    driver = Driver(engine)
    driver.submit(engine.request([2], RANDOM), streams.clear)
    driver.join()
    engine.step()
    assert request.finish_reason == "cancelled"
    check_empty(engine)


def test_closing_ends_all_who_wait_at_once() -> None:
    engine = fake_engine(num_blocks=2000, context_length=8000, max_batch_requests=2)
    driver = Driver(engine)
    driven = [engine.request([number], ENDLESS) for number in range(1, 5)]
    called = [engine.request([number], ENDLESS) for number in range(5, 9)]
    errors: list[str] = []

    def wait(request: Request, follow: bool) -> None:
        try:
            list(engine.follow(request)) if follow else engine.complete([request])
        except UsageError as error:
            errors.append(str(error))

    threads = [
        threading.Thread(target=wait, args=(request, number % 2 == 0))
        for number, request in enumerate(called)
    ]
    for request in driven:
        driver.submit(request, ignore)
    for thread in threads:
        thread.start()
    wait_until(lambda: len(driven[0].output_ids) > 3)
    engine.close()
    num_steps = engine.num_steps
    driver.join()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()
    assert engine.num_steps == num_steps
    assert errors == ["the model is closed; open it anew"] * 4
    for request in driven:
        with pytest.raises(UsageError, match="the model is closed"):
            engine.result(request)
    check_empty(engine)


def test_closing_the_engine_ends_what_is_driven() -> None:
    engine = long_engine()
    driver = Driver(engine)
    request, late = engine.request([1], ENDLESS), engine.request([1], ENDLESS)
    driver.submit(request, ignore)
    wait_until(lambda: len(request.output_ids) > 3)
    engine.close()
    driver.join()
    driver.submit(late, ignore)
    driver.join()
    for failed in (request, late):
        with pytest.raises(UsageError, match="the model is closed"):
            engine.result(failed)
    assert driving_threads() == []
    check_empty(engine)


def test_without_a_thread_nothing_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    driver = Driver(engine)
    request = engine.request([1], RANDOM)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            driver.submit(request, ignore)
    assert engine.step() == 0
    driver.submit(request, ignore)
    driver.join()
    assert request.output_ids == expected_output([1], RANDOM, 128, end=False)
