"""Forks within a step of an open model; child and parent print what each of their calls met."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable

from hypocenter import LLM, AsyncLLM
from hypocenter.base.errors import HypoError
from hypocenter.device import launch
from hypocenter.settings.config import EngineConfig

CONFIG = EngineConfig(context_length=512, num_threads=2)
DEADLINE_SECONDS = 60


def in_child(works: dict[str, Callable[[], object]]) -> int:
    """The id of a child that prints what each of `works` returns or raises, and ends."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    signal.alarm(DEADLINE_SECONDS)
    for name, work in works.items():
        try:
            print(f"{name}: {work()}", flush=True)
        except HypoError as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    os._exit(0)


def open_and_generate() -> list[str]:
    with LLM(config=CONFIG) as own:
        return own.generate("import os", max_tokens=4).text.split()


def fork_within_a_step(llm: AsyncLLM, works: dict[str, Callable[[], object]]) -> str:
    """Fork while the locks of a step are held; what the parent's request gives after all."""
    plain = llm.llm
    plain.generate("import os", max_tokens=4)
    stepping, forked = threading.Event(), threading.Event()
    runner = plain.engine.runner
    run = runner.run

    def run_slowly(batch: object) -> object:
        if stepping.is_set():
            return run(batch)  # type: ignore[arg-type]
        with launch._POOL:
            stepping.set()
            assert forked.wait(DEADLINE_SECONDS)
        return run(batch)  # type: ignore[arg-type]

    runner.run = run_slowly  # type: ignore[method-assign, assignment]

    async def ask() -> str:
        answer = asyncio.create_task(llm.generate("import os", max_tokens=4))
        await asyncio.to_thread(stepping.wait, DEADLINE_SECONDS)
        child = in_child(works)
        forked.set()
        text = (await answer).text
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert status == 0, status
        return text

    return asyncio.run(ask())


def main() -> None:
    llm = AsyncLLM(config=CONFIG)
    plain = llm.llm
    stream, request = plain.stream("import os", max_tokens=4), plain.request("import os")
    works: dict[str, Callable[[], object]] = {
        "generate": lambda: plain.generate("import os", max_tokens=4),
        "chat": lambda: plain.chat([{"role": "user", "content": "x"}]),
        "logits": lambda: plain.logits("import os"),
        "stream": lambda: list(stream),
        "await": lambda: asyncio.run(llm.generate("import os", max_tokens=4)),
        "submit": lambda: plain.engine.submit(request),
        "cancel": lambda: plain.engine.cancel(request),
        "close": llm.close,
        "own": open_and_generate,
    }
    next(stream)
    print("parent:", fork_within_a_step(llm, works).split())
    print("parent:", "".join(piece.text for piece in stream).split())
    llm.close()


if __name__ == "__main__":
    main()
