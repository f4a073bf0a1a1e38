"""AsyncLLM: what LLM does, for coroutines; a thread steps, so that no event loop is held up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self, Unpack, overload

from hypocenter.base.results import Completion
from hypocenter.engine.arguments import (
    ChatFields,
    Conversation,
    Prompt,
    is_one_conversation,
    is_one_prompt,
)
from hypocenter.engine.async_stream import AsyncStream, complete
from hypocenter.engine.driver import Driver
from hypocenter.engine.llm import LLM
from hypocenter.engine.request import Request
from hypocenter.settings.config import EngineConfig, EngineFields, SamplingFields, SamplingParams
from hypocenter.settings.synonyms import explain_unknown


class AsyncLLM:
    """A language model for any number of coroutines, in any number of event loops.

        async with AsyncLLM("model.gguf") as llm:
            answers = await asyncio.gather(llm.generate("a"), llm.generate("b"))

    Requests that are open at once share their steps. A coroutine that is cancelled ends its
    request, which gives its blocks back before the next step. The arguments are those of LLM; the
    model is loaded here, which takes seconds: outside an event loop, or in `asyncio.to_thread`.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str, float], None] | None = None,
        **fields: Unpack[EngineFields],
    ) -> None:
        self._llm = LLM(path, config, progress=progress, **fields)
        self._driver = Driver(self._llm.engine)

    @property
    def llm(self) -> LLM:
        """The same model for threads: its tokenizer, its logits, its route."""
        return self._llm

    @overload
    async def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...
    @overload
    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...
    @overload
    async def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion | list[Completion]:
        """Does what `LLM.generate` does."""
        # In a thread, for a long text takes a while.
        requests = await asyncio.to_thread(self._llm.requests, prompt, params, **fields)
        completions = await complete(self._driver, requests)
        return completions[0] if is_one_prompt(prompt) else completions

    async def sample(
        self,
        prompt: Prompt,
        num_samples: int,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Does what `LLM.sample` does."""
        make = self._llm.sample_requests
        requests = await asyncio.to_thread(make, prompt, num_samples, params, **fields)
        return await complete(self._driver, requests)

    @overload
    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **fields: Unpack[ChatFields],
    ) -> Completion: ...
    @overload
    async def chat(
        self,
        messages: Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[ChatFields],
    ) -> list[Completion]: ...

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[ChatFields],
    ) -> Completion | list[Completion]:
        """Does what `LLM.chat` does."""
        requests = await asyncio.to_thread(self._llm.chat_requests, messages, params, **fields)
        completions = await complete(self._driver, requests)
        return completions[0] if is_one_conversation(messages) else completions

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> AsyncStream:
        """An answer piece by piece. The prompt is checked when the first piece is asked for."""

        def make() -> Request:
            return self._llm.request(prompt, params, **fields)

        return AsyncStream(self._driver, make)

    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        **fields: Unpack[ChatFields],
    ) -> AsyncStream:
        """Like `chat` for one conversation, piece by piece as in `stream`."""

        def make() -> Request:
            return self._llm.chat_request(messages, params, **fields)

        return AsyncStream(self._driver, make)

    def close(self) -> None:
        """Does what `LLM.close` does: whoever still waits gets an error. Waits for a running
        step."""
        self._llm.close()
        self._driver.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    if not TYPE_CHECKING:  # or no unknown name would be found by a type checker

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):  # others ask for these, to see what an object can do
                raise AttributeError(f"AsyncLLM has no {name!r}")
            if hasattr(LLM, name):
                raise AttributeError(f"AsyncLLM has no {name!r}; its property llm has it")
            members = [member for member in dir(type(self)) if not member.startswith("_")]
            raise AttributeError(explain_unknown("AsyncLLM", name, members))

    def __repr__(self) -> str:
        return f"Async{self._llm!r}"
