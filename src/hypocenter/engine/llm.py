"""LLM: a model file and an engine behind a handful of methods; no scheduling, no global state."""

from __future__ import annotations

import difflib
import importlib.resources
import reprlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from hypocenter.config import (
    MAX_SEED,
    EngineConfig,
    EngineFields,
    SamplingFields,
    SamplingParams,
    as_environment_asks,
    defaults,
)
from hypocenter.engine.engine import Engine
from hypocenter.engine.request import Request
from hypocenter.engine.runner import load_runner
from hypocenter.errors import BadSetting, UsageError
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.chat import ChatTemplate, load_chat_template
from hypocenter.model.text.tokenizer import Tokenizer, load_tokenizer
from hypocenter.package import BUNDLED_MODEL
from hypocenter.results import Completion, Delta, Route

Prompt = str | Sequence[int]
Message = Mapping[str, str]
_S = TypeVar("_S", EngineConfig, SamplingParams)
_ARTICLES: dict[type, str] = {EngineConfig: "an", SamplingParams: "a"}
#: Answers to one prompt in one call.
MAX_SAMPLES = 4096


class LLM:
    """A language model that generates, chats and shows its logits.

        with LLM("model.gguf", context_length=4096) as llm:
            print(llm.generate("def read_lines(path):", max_tokens=64).text)

    `path` None takes the small model that comes with hypocenter. `fields` are those of
    EngineConfig, over those of `config`. `progress` is called with what is being done and how much
    of it is done, from 0 to 1. Raises BadModelFile, UnsupportedModel or UsageError when the file
    cannot be run as that asks.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str, float], None] | None = None,
        **fields: Unpack[EngineFields],
    ) -> None:
        config = as_environment_asks(_with_fields("config", config, EngineConfig, fields))
        if path is not None:
            _require("path", path, "a text or a Path", str, Path)
        with ExitStack() as stack:
            file = stack.enter_context(open_gguf(_find(path, stack)))
            self._path = file.path
            self._tokenizer = load_tokenizer(file, config.tokenizer_pre)
            self._chat_template = load_chat_template(file, self._tokenizer, config.chat_template)
            if self._chat_template is not None:
                stack.enter_context(self._chat_template)
            runner = load_runner(file, config, progress)
            self._engine = Engine(
                runner, self._tokenizer, file.path, launch_mode=config.launch_mode
            )
            stack.callback(self._engine.close)
            self._resources = stack.pop_all()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template that came with the model, or None."""
        return self._chat_template

    @property
    def context_length(self) -> int:
        """The most tokens that prompt and output may have together."""
        return self._engine.runner.context_length

    @property
    def engine(self) -> Engine:
        """For callers that submit and drive requests themselves."""
        return self._engine

    def route(self) -> Route:
        """What the model really runs on, read from inside."""
        return self._engine.route()

    # A str is a Sequence[str] to the type checker; the first overload decides.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion | list[Completion]:
        """Continue a text or token ids; of a sequence of these, all together and in order.

        `params` are for all prompts, or one for each; `fields` are those of SamplingParams, over
        those of `params`. A text is encoded with the model's BOS, token ids are taken as they are.
        Nothing runs when one of the prompts is refused: ContextOverflow for one longer than the
        context, UsageError for one without tokens or of a wrong type. Raises the error of the first
        request that failed.
        """
        prompts = [cast(Prompt, prompt)] if _is_one(prompt) else cast("Sequence[Prompt]", prompt)
        each = _params_of_each(params, len(prompts), is_one=_is_one(prompt))
        requests = [self._request(*pair, fields) for pair in zip(prompts, each, strict=True)]
        completions = self._engine.complete(requests)
        return completions[0] if _is_one(prompt) else completions

    def sample(
        self,
        prompt: Prompt,
        num_samples: int,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> list[Completion]:
        """Several answers to one prompt, all together; `temperature` 0 would make them the same.

        Without a seed each has one of its own; with one they have it and those that follow it.
        Raises what `generate` raises.
        """
        _require("num_samples", num_samples, "a whole number", int)
        if not 1 <= num_samples <= MAX_SAMPLES:
            raise BadSetting("num_samples", num_samples, f"must be from 1 to {MAX_SAMPLES}")
        given = _with_fields("params", params, SamplingParams, fields)
        seeds = [
            None if given.seed is None else (given.seed + number) % (MAX_SEED + 1)
            for number in range(num_samples)
        ]
        ids = self._encode(prompt)
        return self.generate([ids] * num_samples, [replace(given, seed=seed) for seed in seeds])

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generator[Delta, None, Completion]:
        """Like `generate` for one prompt, piece by piece; the generator returns the Completion.

        The prompt is checked at once, and runs when the first piece is asked for. Closing the
        generator cancels the request.
        """
        return self._engine.follow(self._request(prompt, params, fields))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Completion:
        """Answer a conversation: messages with "role" and "content".

        Raises UsageError for a model without chat template, TemplateError when the template
        refuses the messages, and what `generate` raises.
        """
        request = self._request(self.encode_chat(messages), params, fields)
        return self._engine.complete([request])[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **fields: Unpack[SamplingFields],
    ) -> Generator[Delta, None, Completion]:
        """Like `chat`, piece by piece as in `stream`."""
        return self._engine.follow(self._request(self.encode_chat(messages), params, fields))

    def logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """The logits after each token of the prompt, f32 [num_tokens, vocab_size].

        Mind the size: 4096 tokens of a vocabulary of 128256 are 2 GiB.
        """
        request = self._engine.request(
            self._encode(prompt), SamplingParams(max_tokens=0), keeps_logits=True
        )
        self._engine.complete([request])
        return np.concatenate(request.logits)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, up to where the answer begins.

        Control tokens are recognised in the template's own text only, never in what the messages
        say; so nobody can end his turn by writing the token that ends it.
        """
        if self._chat_template is None:
            raise UsageError(
                f"{self._path} has no chat template, so it cannot chat; continue a text instead"
            )
        ids: list[int] = []
        for text, from_template in self._chat_template.render_parts(messages):
            ids += self._tokenizer.encode(text, add_special=False, parse_special=from_template)
        bos_id = self._tokenizer.bos_id
        # Most templates write the BOS themselves; it must stand there once.
        if self._tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def close(self) -> None:
        """Give everything back; requests that still run end with an error. May be called twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        route = self.route()
        return f"LLM({str(self._path)!r}, device={route.device!r}, {self.context_length} positions)"

    def _request(
        self, prompt: Prompt, params: SamplingParams | None, fields: SamplingFields
    ) -> Request:
        given = _with_fields("params", params, SamplingParams, fields)
        return self._engine.request(self._encode(prompt), given)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return _token_ids(prompt)
        ids = self._tokenizer.encode(prompt)
        if not ids:
            raise UsageError(
                "the prompt is empty, and this model begins without a BOS token; give it some text"
            )
        return ids


def _with_fields(name: str, given: _S | None, kind: type[_S], fields: Mapping[str, Any]) -> _S:
    """Settings with single fields over them; raises UsageError for one that they do not have."""
    if given is not None:
        _require(name, given, f"{_ARTICLES[kind]} {kind.__name__}", kind)
    known = defaults(kind)
    for field in fields:
        if field not in known:
            near = difflib.get_close_matches(field, known, 1)
            way_out = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise UsageError(f"{kind.__name__} has no {field!r}; {way_out}")
    return replace(given, **fields) if given is not None else kind(**fields)


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int, *, is_one: bool
) -> Sequence[SamplingParams | None]:
    """The parameters of each prompt."""
    if params is None or isinstance(params, SamplingParams) or is_one:
        return [cast("SamplingParams | None", params)] * num_prompts
    _require("params", params, "a SamplingParams, or one for each prompt", Sequence)
    if len(params) != num_prompts:
        raise UsageError(f"{len(params)} params for {num_prompts} prompts; give one for each")
    return params


def _is_one(prompt: Any) -> bool:
    """Whether this is one prompt, and not a sequence of prompts. An empty list holds no prompts."""
    if isinstance(prompt, str):
        return True
    _require_prompt(prompt)
    return len(prompt) > 0 and all(isinstance(item, int | np.integer) for item in prompt)


def _token_ids(prompt: Any) -> list[int]:
    """Token ids as they were given; raises UsageError where something else is among them."""
    _require_prompt(prompt)
    for place, item in enumerate(prompt):
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise UsageError(
                f"prompt token {place} is {reprlib.repr(item)}, but must be a whole number; a "
                "prompt is a text or token ids"
            )
    return [int(token_id) for token_id in prompt]


def _require_prompt(prompt: object) -> None:
    """Raises UsageError for what is neither a text nor a sequence; bytes are neither here."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise UsageError("prompt is bytes, but must be a text; decode it first")
    _require("prompt", prompt, "a text, token ids or a list of these", str, Sequence, np.ndarray)


def _require(name: str, value: object, wanted: str, *kinds: type) -> None:
    if not isinstance(value, kinds):
        shown = "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"
        raise UsageError(f"{name} is {shown}, but must be {wanted}")


def _find(path: str | Path | None, stack: ExitStack) -> Path:
    if path is not None:
        return Path(path)
    asset = importlib.resources.files("hypocenter") / "assets" / BUNDLED_MODEL
    return stack.enter_context(importlib.resources.as_file(asset))
