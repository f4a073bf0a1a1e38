"""Coroutines share one model: their requests run together, end with them, and hold up no loop."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType
from models.demo_variants import demo_with
from pretended.fake_runner import POISON_ID, batches_of, expected_output, fake_engine

from hypocenter import LLM, AsyncLLM, EngineConfig, SamplingParams
from hypocenter.base.errors import BadLogits, UsageError
from hypocenter.base.results import Delta
from hypocenter.engine.async_stream import AsyncStream, complete
from hypocenter.engine.driver import Driver
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request

RANDOM = SamplingParams(max_tokens=20, temperature=0.8, seed=11, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
CONFIG = EngineConfig(num_threads=1, max_batch_requests=4)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
PROMPTS = ["def read_lines(path):\n", "import os\n", "class A:", "for i in range("]
DEADLINE_SECONDS = 30.0


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    path = tmp_path_factory.mktemp("models") / "chat.gguf"
    demo_with(path, {"tokenizer.chat_template": (TEMPLATE, GGUFValueType.STRING)})
    llm = AsyncLLM(path, CONFIG)
    yield llm
    llm.close()


def fake(**sizes: Any) -> tuple[Engine, Driver]:
    engine = fake_engine(**sizes)
    return engine, Driver(engine)


def long_fake() -> tuple[Engine, Driver]:
    """In which an endless request goes no further than some steps, until somebody cancels one."""
    engine, driver = fake(num_blocks=2000, context_length=8000)
    request, run, asked = engine.request, engine.runner.run, list[Request]()

    def noted(*given: Any, **named: Any) -> Request:
        asked.append(request(*given, **named))
        return asked[-1]

    def run_until_one_is_left(batch: Any) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(batches_of(engine)) > 500 and not any(one.cancel_requested for one in asked):
            assert time.monotonic() < deadline, "nobody was cancelled"
            time.sleep(0.001)
        return run(batch)

    engine.request = noted  # type: ignore[method-assign]
    engine.runner.run = run_until_one_is_left  # type: ignore[method-assign]
    return engine, driver


def expected(request: Request) -> list[int]:
    return expected_output(request.prompt_ids, request.params, 128, end=False)


async def come(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.001)


def check_cancelled(engine: Engine, driver: Driver, request: Request, num_then: int) -> None:
    """That it ended within a step of where it was, and gave its blocks back."""
    driver.join()
    assert request.finish_reason == "cancelled"
    assert len(request.output_ids) <= num_then + 1
    engine.check_integrity()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_requests_of_many_coroutines_run_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, driver = fake(num_blocks=400, max_batch_requests=32, max_batch_tokens=64)
    all_there = threading.Event()
    run = engine.runner.run

    def run_when_all_are_there(batch: Any) -> Any:
        assert all_there.wait(DEADLINE_SECONDS)
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", run_when_all_are_there)

    async def ask_all() -> tuple[list[Request], int]:
        requests = [engine.request([number + 1], RANDOM) for number in range(32)]
        tasks = [asyncio.create_task(complete(driver, [request])) for request in requests]
        await asyncio.sleep(0)
        num_threads = threading.active_count()
        all_there.set()
        for task, request in zip(tasks, requests, strict=True):
            assert (await task)[0].token_ids == tuple(request.output_ids)
        return requests, num_threads

    before = threading.active_count()
    requests, num_threads = asyncio.run(ask_all())
    assert num_threads == before + 1
    assert [request.output_ids for request in requests] == list(map(expected, requests))
    assert max(len(batch.block_tables) for batch in batches_of(engine)) == 32
    assert len(batches_of(engine)) <= 22


def test_a_loop_goes_on_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step ends only once the loop has had a turn within it."""
    engine, driver = fake()
    is_within, had_a_turn = threading.Event(), threading.Event()
    came: list[bool] = []
    run = engine.runner.run

    def run_until_the_loop_had_a_turn(batch: Any) -> Any:
        is_within.set()
        came.append(had_a_turn.wait(DEADLINE_SECONDS))
        had_a_turn.clear()
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", run_until_the_loop_had_a_turn)

    async def tick() -> None:
        two = SamplingParams(max_tokens=2, ignore_eos=True)
        task = asyncio.create_task(complete(driver, [engine.request([1], two)]))
        while not task.done():
            if is_within.is_set():
                is_within.clear()
                had_a_turn.set()
            await asyncio.sleep(0.001)

    asyncio.run(tick())
    assert came == [True, True]


def test_a_cancelled_task_ends_its_request() -> None:
    engine, driver = long_fake()

    async def cancel() -> tuple[Request, int]:
        request = engine.request([1], ENDLESS)
        task = asyncio.create_task(complete(driver, [request]))
        await come(lambda: len(request.output_ids) > 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return request, len(request.output_ids)

    check_cancelled(engine, driver, *asyncio.run(cancel()))


async def collect(stream: AsyncStream) -> list[Delta]:
    return [piece async for piece in stream]


async def time_out(stream: AsyncStream) -> None:
    await anext(stream)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            async for _ in stream:
                pass
        raise AssertionError("it did not take that long")


async def close_early(stream: AsyncStream) -> None:
    async with contextlib.aclosing(stream):
        async for _ in stream:
            break
    assert [piece async for piece in stream] == []


async def break_and_forget(stream: AsyncStream) -> None:
    async for _ in stream:
        break


@pytest.mark.parametrize("leave", [time_out, close_early, break_and_forget])
def test_a_stream_left_early_is_cancelled(leave: Callable[[AsyncStream], Awaitable[None]]) -> None:
    engine, driver = long_fake()
    request = engine.request([1], ENDLESS)

    async def begin() -> int:
        await leave(AsyncStream(driver, lambda: request))
        return len(request.output_ids)

    num_then = asyncio.run(begin())
    assert num_then > 0
    check_cancelled(engine, driver, request, num_then)


def test_a_stream_that_nobody_begins_runs_nothing() -> None:
    engine, driver = fake()

    async def begin() -> None:
        stream = AsyncStream(driver, lambda: engine.request([1], RANDOM))
        with pytest.raises(UsageError, match="the answer has not ended"):
            _ = stream.completion
        await stream.aclose()
        assert [piece async for piece in stream] == []

    asyncio.run(begin())
    driver.join()
    assert batches_of(engine) == []


def test_a_stream_is_the_completion_in_pieces() -> None:
    engine, driver = fake()

    async def collect() -> tuple[list[Delta], AsyncStream]:
        stream = AsyncStream(driver, lambda: engine.request([1, 2, 3], RANDOM))
        return [piece async for piece in stream], stream

    pieces, stream = asyncio.run(collect())
    whole = stream.completion
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == list(whole.token_ids)
    assert [piece.finish_reason for piece in pieces] == [None] * 19 + ["length"]
    assert whole.token_ids == tuple(expected_output([1, 2, 3], RANDOM, 128, end=False))


def test_a_second_reader_is_refused_and_the_first_reads_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, driver = fake()
    refused = threading.Event()  # until then the first waits for its first piece
    run = engine.runner.run

    def run_once_refused(batch: Any) -> Any:
        assert refused.wait(DEADLINE_SECONDS)
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", run_once_refused)

    async def read() -> list[int]:
        stream = AsyncStream(driver, lambda: engine.request([1, 2, 3], RANDOM))
        first = asyncio.create_task(collect(stream))
        for _ in range(3):
            await asyncio.sleep(0)
            with pytest.raises(UsageError, match="another coroutine reads this stream"):
                await asyncio.wait_for(anext(stream), DEADLINE_SECONDS)
        refused.set()
        pieces = await asyncio.wait_for(first, DEADLINE_SECONDS)
        assert stream.completion.finish_reason == "length"
        return [token for piece in pieces for token in piece.token_ids]

    assert asyncio.run(read()) == expected_output([1, 2, 3], RANDOM, 128, end=False)


@pytest.mark.parametrize("has_waited", [False, True])
def test_a_stream_belongs_to_one_loop(has_waited: bool) -> None:
    engine, driver = long_fake()
    stream = AsyncStream(driver, lambda: engine.request([1], ENDLESS))

    async def begin() -> None:
        await anext(stream)
        while has_waited and stream._request and stream._request.deltas:
            await anext(stream)

    async def go_on() -> None:
        with pytest.raises(UsageError, match="began in another event loop"):
            await asyncio.wait_for(collect(stream), DEADLINE_SECONDS)
        await stream.aclose()
        assert await collect(stream) == []

    asyncio.run(begin())
    asyncio.run(go_on())
    driver.join()
    engine.check_integrity()


def test_a_stream_closed_while_it_begins_runs_nothing() -> None:
    engine, driver = fake()
    closed = threading.Event()

    def make() -> Request:
        assert closed.wait(DEADLINE_SECONDS)
        return engine.request([1], RANDOM)

    async def close() -> None:
        stream = AsyncStream(driver, make)
        reading = asyncio.create_task(collect(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        closed.set()
        assert await asyncio.wait_for(reading, DEADLINE_SECONDS) == []

    asyncio.run(close())
    driver.join()
    assert batches_of(engine) == []


def test_errors_reach_those_whom_they_concern() -> None:
    engine, driver = fake()

    async def ask() -> None:
        bad, good = engine.request([POISON_ID, 2], RANDOM), engine.request([2], RANDOM)
        failed, done = await asyncio.gather(
            complete(driver, [bad]), complete(driver, [good]), return_exceptions=True
        )
        assert isinstance(failed, BadLogits)
        assert not isinstance(done, BaseException)
        assert done[0].token_ids == tuple(expected(good))
        stream = AsyncStream(driver, lambda: engine.request([POISON_ID], RANDOM))
        with pytest.raises(BadLogits):
            await anext(stream)
        with pytest.raises(BadLogits):
            _ = stream.completion
        with pytest.raises(UsageError, match="has no tokens"):
            await anext(AsyncStream(driver, lambda: engine.request([], RANDOM)))

    asyncio.run(ask())
    driver.join()
    engine.check_integrity()


def test_of_several_requests_the_first_error_comes_when_all_have_ended() -> None:
    engine, driver = fake()
    requests = [engine.request(prompt, RANDOM) for prompt in ([1], [POISON_ID], [2])]
    with pytest.raises(BadLogits):
        asyncio.run(complete(driver, requests))
    assert all(request.done for request in requests)
    assert requests[2].output_ids == expected(requests[2])


def test_a_loop_that_is_closed_leaves_nothing_running() -> None:
    engine, driver = long_fake()
    requests = [engine.request([number], ENDLESS) for number in (1, 2)]
    loop = asyncio.new_event_loop()
    task = loop.create_task(complete(driver, requests[:1]))
    stream = AsyncStream(driver, lambda: requests[1])
    loop.run_until_complete(come(lambda: bool(requests[0].output_ids)))
    loop.run_until_complete(stream.__anext__())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    driver.join()
    assert not task.done()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    assert [request.finish_reason for request in requests] == ["cancelled"] * 2
    engine.check_integrity()
    assert engine.cache.num_free_blocks == engine.cache.num_blocks


def test_closing_ends_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait() -> None:
        async with AsyncLLM(num_threads=1, context_length=512) as llm:
            engine = llm.llm.engine
            request = engine.request([1, 2], ENDLESS)
            monkeypatch.setattr(llm.llm, "requests", lambda *given, **fields: [request])
            task = asyncio.create_task(llm.generate("x"))
            await come(lambda: len(request.output_ids) > 3)
        with pytest.raises(UsageError, match="the model is closed"):
            await task
        monkeypatch.undo()
        with pytest.raises(UsageError, match="the model is closed"):
            await llm.generate("x")
        with pytest.raises(UsageError, match="the model is closed"):
            await anext(llm.stream("x"))
        llm.close()
        engine.check_integrity()

    asyncio.run(wait())


def test_a_closed_model_begins_no_process_for_its_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = demo_with(
        tmp_path / "chat.gguf", {"tokenizer.chat_template": (TEMPLATE, GGUFValueType.STRING)}
    )
    llm = LLM(path, CONFIG)
    llm.close()
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(UsageError, match="the model is closed"):
        llm.chat([{"role": "user", "content": "x"}])


def test_each_call_gives_what_that_of_an_llm_gives(llm: AsyncLLM) -> None:
    plain = llm.llm
    conversation = [{"role": "user", "content": "sort a list"}]

    async def ask() -> None:
        one = await llm.generate(PROMPTS[0], RANDOM, logprobs=1)
        assert one.token_ids == plain.generate(PROMPTS[0], RANDOM).token_ids
        assert len(one.logprobs or ()) == len(one.token_ids)
        ids = plain.tokenizer.encode(PROMPTS[1])
        assert (await llm.generate(ids, RANDOM)).text == plain.generate(ids, RANDOM).text
        many = await llm.generate(PROMPTS, RANDOM)
        assert [a.token_ids for a in many] == [a.token_ids for a in plain.generate(PROMPTS, RANDOM)]
        samples = await llm.sample(PROMPTS[0], 3, RANDOM)
        assert [a.token_ids for a in samples] == [
            a.token_ids for a in plain.sample(PROMPTS[0], 3, RANDOM)
        ]
        answer = await llm.chat(conversation, RANDOM)
        assert answer.token_ids == plain.chat(conversation, RANDOM).token_ids
        two = await llm.chat([conversation, conversation], RANDOM)
        assert [a.token_ids for a in two] == [answer.token_ids] * 2
        for stream, whole in (
            (llm.stream(PROMPTS[0], RANDOM, max_tokens=5), one),
            (llm.stream_chat(conversation, RANDOM, max_tokens=5), answer),
        ):
            text = "".join([piece.text async for piece in stream])
            assert text == stream.completion.text
            assert stream.completion.token_ids == whole.token_ids[:5]
        with pytest.raises(UsageError, match="called repeat_penalty"):
            await llm.generate("x", repetition_penalty=1.1)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="prompt token 0 is 'a'"):
            await anext(llm.stream(["a", "b"]))  # type: ignore[list-item]

    asyncio.run(ask())
    assert repr(llm).startswith("AsyncLLM('")


def test_two_loops_and_a_thread_share_one_model(llm: AsyncLLM) -> None:
    alone = [llm.llm.generate(prompt, RANDOM).token_ids for prompt in PROMPTS]
    found: dict[str, Any] = {}

    async def ask_all() -> list[tuple[int, ...]]:
        answers = await asyncio.gather(*(llm.generate(prompt, RANDOM) for prompt in PROMPTS * 2))
        return [answer.token_ids for answer in answers]

    def work(name: str) -> None:
        found[name] = asyncio.run(ask_all())

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    plain = [llm.llm.generate(prompt, RANDOM).token_ids for prompt in PROMPTS * 2]
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert found == {"first": alone * 2, "second": alone * 2}
    assert plain == alone * 2
    llm.llm.engine.check_integrity()


def test_a_program_that_closes_nothing_ends_at_once() -> None:
    code = (
        "import asyncio\n"
        "from hypocenter import AsyncLLM\n"
        "async def main():\n"
        "    asyncio.create_task(llm.generate('x', max_tokens=None, ignore_eos=True))\n"
        "    async for piece in llm.stream('import os', max_tokens=None, ignore_eos=True):\n"
        "        break\n"
        "llm = AsyncLLM(context_length=512, num_threads=1)\n"
        "asyncio.run(main())\n"
        "print('done')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")


def test_a_fork_within_a_step_keeps_nobody_waiting() -> None:
    program = Path(__file__).parents[1] / "support" / "fork_child.py"
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = [line.split(": ", 1) for line in ended.stdout.splitlines()]
    assert [where for where, _ in told] == [
        *("generate", "chat", "logits", "stream", "await", "submit", "cancel", "close", "own"),
        *["parent"] * 2,
    ]
    for _, refusal in told[:6]:
        assert refusal.startswith("UsageError: the model was opened by process ")
        assert refusal.endswith(", forked from it; open the model in each process")
    assert [answer for _, answer in told[6:]] == ["None"] * 2 + ["['import', 'sys']"] * 3


def test_an_llm_of_the_same_file_is_no_part_of_it(llm: AsyncLLM, tmp_path: Path) -> None:
    assert isinstance(llm.llm, LLM)
    with pytest.raises(UsageError, match="there is no such file"):
        AsyncLLM(tmp_path / "missing.gguf")
