"""A real reader: what it says of texts and forms, and how it ends when one takes too much."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from hypocenter import EngineConfig
from hypocenter.base.package import bundled_model
from hypocenter.server.reading.reader_process import CannotRead, ReaderEnded, ReaderProcess
from hypocenter.wire.messages import (
    Ask,
    Failed,
    FormRead,
    ReadForm,
    ReadingLimits,
    StartReader,
    Told,
)

#: Takes seconds and much memory to read, but has few bytes.
SLOW = json.dumps(
    {
        "type": "object",
        "properties": {f"name{number}": {} for number in range(4000)},
        "additionalProperties": {"type": "integer"},
    }
)
CHATTY = EngineConfig(chat_template="chatml")


def reader(model: Path | None = None, **limits: Any) -> ReaderProcess:
    bounds = ReadingLimits(**limits)
    return ReaderProcess(StartReader(str(model or bundled_model()), CHATTY, True, bounds))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def test_a_reader_says_what_texts_and_forms_are() -> None:
    async def work() -> None:
        one = reader()
        await one.start()
        try:
            told = await one.answer(Ask(1, text="import os", add_special=False, needs_pieces=True))
            assert isinstance(told, Told)
            assert (b"".join(told.pieces), told.text) == (b"import os", "import os")
            assert await one.answer(Ask(2, token_ids=told.token_ids)) == Told(
                2, "import os", told.token_ids
            )
            asked = Ask(3, text="import os", is_prompt=True, bad_words=("os",))
            prompt = await one.answer(asked)
            assert isinstance(prompt, Told)
            assert (prompt.token_ids[1:], prompt.text) == (told.token_ids, "")
            assert prompt.bad_word_ids
            lone = await one.answer(Ask(4, text="\ud800", is_prompt=True))
            assert isinstance(lone, Failed)
            assert (lone.id, lone.kind) == (4, "TokenizerError")
            hi = ({"role": "user", "content": "hi" * 50},)
            chat = await one.answer(Ask(5, messages=hi))
            assert isinstance(chat, Told)
            assert chat.text.endswith("<|im_start|>assistant\n")
            long = await one.answer(Ask(6, messages=hi, max_chars=100))
            assert isinstance(long, Failed)
            assert (long.kind, long.field) == ("TooMuchText", "messages")
            form = await one.answer(ReadForm(7, "json_schema", '{"type": "integer"}'))
            assert isinstance(form, FormRead)
            assert form.compiled
            bad = await one.answer(ReadForm(8, "grammar", "start: missing"))
            assert isinstance(bad, Failed)
            assert (bad.id, bad.kind, bad.field) == (8, "BadSetting", "grammar")
        finally:
            await one.close()

    run(work())


@pytest.mark.parametrize(
    ("limits", "question", "how"),
    [
        ({"form_cpu_seconds": 0.2}, ReadForm(1, "json_schema", SLOW), "0.2 s of processor time"),
        ({"text_cpu_seconds": 0.1}, Ask(1, text="x y" * (1 << 20)), "0.1 s of processor time"),
        ({"memory_bytes": 16 << 20}, Ask(1, text="x y" * (1 << 20)), "16 MiB of memory"),
        ({"memory_bytes": 16 << 20}, ReadForm(1, "json_schema", SLOW), "16 MiB of memory"),
    ],
)
def test_what_takes_too_much_ends_its_reader_alone(
    limits: dict[str, Any], question: Ask | ReadForm, how: str
) -> None:
    async def work() -> None:
        one = reader(**limits)
        await one.start()
        try:
            assert isinstance(await one.answer(Ask(2, text="import os")), Told)
            with pytest.raises(ReaderEnded, match=how) as raised:
                await one.answer(question)
            assert not raised.value.is_innocent
            with pytest.raises(ReaderEnded) as raised:
                await one.answer(Ask(3, text="import os"))
            assert raised.value.is_innocent, "that question has nothing to do with it"
        finally:
            await one.close()

    run(work())


def test_a_reader_that_is_stopped_or_killed_is_noticed() -> None:
    async def work() -> None:
        one = reader(wall_seconds=0.5)
        await one.start()
        assert one.pid is not None
        os.kill(one.pid, signal.SIGSTOP)
        with pytest.raises(ReaderEnded, match=r"more than 0\.5 s") as raised:
            await one.answer(Ask(1, text="import os"))
        assert not raised.value.is_innocent
        other = reader()
        await other.start()
        assert other.pid is not None
        asking = asyncio.ensure_future(other.answer(Ask(1, text="x y" * (1 << 19))))
        await asyncio.sleep(0.05)
        os.kill(other.pid, signal.SIGKILL)
        with pytest.raises(ReaderEnded, match=r"^it was ended by SIGKILL, and not by") as raised:
            await asking
        assert raised.value.is_innocent
        await other.close()

    run(work())


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(CannotRead, match=r"none\.gguf"):
            await reader(tmp_path / "none.gguf").start()

    run(work())
