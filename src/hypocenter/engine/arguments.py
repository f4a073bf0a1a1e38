"""What callers give an LLM: prompts, settings and conversations, told apart and checked by type."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, cast

import numpy as np

from hypocenter.base.errors import HypoError, UsageError
from hypocenter.conversation.call_forms import CallRules, read_choice
from hypocenter.conversation.tools import Tools, check_tools
from hypocenter.model.text.chat import Message
from hypocenter.settings.config import EngineConfig, SamplingFields, SamplingParams

Prompt = str | Sequence[int]
Conversation = Sequence[Message]


class ChatFields(SamplingFields, total=False):
    """What a chat takes as keywords: the fields of SamplingParams, and those of a conversation."""

    chat_template_kwargs: Mapping[str, object] | None
    tools: Tools | None
    tool_choice: str | Mapping[str, object]
    continue_final_message: bool


@dataclass(frozen=True)
class ChatOptions:
    """The arguments of a conversation, beside its messages; each as in `LLM.chat`."""

    chat_template_kwargs: Mapping[str, object] | None = None
    tools: Tools | None = None
    tool_choice: str | Mapping[str, object] = "auto"
    continue_final_message: bool = False

    def calls(self) -> CallRules:
        """Raises UsageError for a choice that is none, or of tools that are not there."""
        return read_choice(self.tool_choice, check_tools(self.tools))


_OPTIONS = tuple(field.name for field in fields(ChatOptions))


def split_chat_fields(given: ChatFields) -> tuple[ChatOptions, SamplingFields]:
    """The options of a conversation, and the fields of SamplingParams.

    With `tool_choice` "none" no tools are offered. Raises UsageError for an option's wrong type.
    """
    of_chat = {name: value for name, value in given.items() if name in _OPTIONS}
    options = ChatOptions(**cast("dict[str, Any]", of_chat))
    require("continue_final_message", options.continue_final_message, "True or False", bool)
    require("tool_choice", options.tool_choice, "a text or a mapping", str, Mapping)
    if options.tool_choice == "none":
        options = replace(options, tools=None, tool_choice="auto")
    sampling = {name: value for name, value in given.items() if name not in _OPTIONS}
    return options, cast(SamplingFields, sampling)


_S = TypeVar("_S", EngineConfig, SamplingParams)
_ARTICLES: dict[type, str] = {EngineConfig: "an", SamplingParams: "a"}


def with_fields(name: str, given: _S | None, kind: type[_S], fields: Mapping[str, Any]) -> _S:
    """Settings with single fields over them; raises UsageError for one that they do not have."""
    if given is None:
        return kind(**fields)
    require(name, given, f"{_ARTICLES[kind]} {kind.__name__}", kind)
    return replace(given, **fields)


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int, *, is_one: bool
) -> Sequence[SamplingParams | None]:
    """The parameters of each prompt, or of each conversation."""
    if params is None or isinstance(params, SamplingParams) or is_one:
        return [cast("SamplingParams | None", params)] * num_prompts
    require("params", params, "a SamplingParams, or one for each prompt", Sequence)
    if len(params) != num_prompts:
        raise UsageError(f"{len(params)} params for {num_prompts} prompts; give one for each")
    return params


@contextlib.contextmanager
def noting_place(what: str, place: int, num: int) -> Iterator[None]:
    """Within, an error has a note that says which of several it concerns."""
    try:
        yield
    except HypoError as error:
        if num > 1:
            error.add_note(f"this is {what} {place} of 0 to {num - 1}")
        raise


def is_one_prompt(prompt: Any) -> bool:
    """Whether this is one prompt, and not a sequence of prompts. An empty list holds no prompts."""
    if isinstance(prompt, str):
        return True
    _require_prompt(prompt)
    return len(prompt) > 0 and all(isinstance(item, int | np.integer) for item in prompt)


def is_one_conversation(messages: Any) -> bool:
    """Whether these are messages, and not a sequence of conversations.

    What is neither counts as one: its own check then says what is wrong with it.
    """
    require("messages", messages, "a list of messages, or a list of such lists", Sequence)
    return not messages or not all(
        isinstance(item, Sequence) and not isinstance(item, str | bytes) for item in messages
    )


def token_ids_of(prompt: Any) -> list[int]:
    """Token ids as they were given; raises UsageError where something else is among them."""
    _require_prompt(prompt)
    for place, item in enumerate(prompt):
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise UsageError(
                f"prompt token {place} is {reprlib.repr(item)}, but must be a whole number; a "
                "prompt is a text or token ids"
            )
    return [int(token_id) for token_id in prompt]


def require_in_vocabulary(what: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises UsageError for the first token id that the model does not have."""
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise UsageError(
                f"{what} token {place} is {token_id}, but the vocabulary has {vocab_size}"
            )


def _require_prompt(prompt: object) -> None:
    """Raises UsageError for what is neither a text nor a sequence; bytes are neither here."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise UsageError("prompt is bytes, but must be a text; decode it first")
    require("prompt", prompt, "a text, token ids or a list of these", str, Sequence, np.ndarray)


def require(name: str, value: object, wanted: str, *kinds: type) -> None:
    if not isinstance(value, kinds):
        shown = "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"
        raise UsageError(f"{name} is {shown}, but must be {wanted}")
