"""Bodies of Ollama's `/api/chat` and `/api/generate`, and the chats or texts that these become.

https://docs.ollama.com/api. What `options` leave out is what Ollama takes there. Never asks a
worker itself.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hypocenter.base.errors import BadSetting
from hypocenter.conversation.thoughts import EFFORTS, has_thoughts, variables
from hypocenter.server.api_error import ApiError
from hypocenter.server.bodies.sampling_fields import chat_params
from hypocenter.server.dialects.turns import Noted, as_json
from hypocenter.server.fields import ChatBody, ResponseFormat
from hypocenter.server.generation import AnswerOrder, Manner

#: What Ollama samples with where nobody says.
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
#: Of `options`: what is read, under which name of a chat's body.
SAMPLED = {
    "frequency_penalty": "frequency_penalty",
    "min_p": "min_p",
    "num_predict": "max_tokens",
    "presence_penalty": "presence_penalty",
    "repeat_penalty": "repeat_penalty",
    "seed": "seed",
    "stop": "stop",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
#: Of `options`: how a model is loaded there. Here whoever starts the server says that.
HARMLESS = frozenset(
    {
        *("f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu", "num_keep"),
        *("num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
    }
)
#: Of `options`: passed over, which is told of: whoever starts the server says it.
TOLD = frozenset({"num_ctx"})
#: Of `options`: what would change the answer, and values that do not.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "draft_num_predict": (0,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5, 5.0),
    "penalize_newline": (True,),
    "repeat_last_n": (-1, 64),
    "tfs_z": (1, 1.0),
    "typical_p": (1, 1.0),
}
_ENDLESS = -1
_ROLES = frozenset({"system", "user", "assistant", "tool"})


class OllamaBody(msgspec.Struct, kw_only=True):
    """The fields that both have. An answer is a stream unless it is said not to be."""

    model: str = ""
    stream: bool | None = None
    #: "json", or a schema.
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    #: Whether to think, or how much.
    think: bool | str | None = None
    logprobs: bool | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    template: str | None = None
    #: Whether the prompt is the text itself, and no question.
    raw: bool | None = None
    images: list[Any] | None = None
    context: list[int] | None = None


def chat_of(body: OllamaChatBody, chat_template: str) -> tuple[ChatBody, list[str]]:
    """The same as a chat, and what was passed over. Raises ApiError."""
    Noted().require_room(len(body.messages or ()), "messages")
    messages = [
        _message_of(message, f"messages[{place}]")
        for place, message in enumerate(body.messages or ())
    ]
    shared, ignored = _common_fields(body, chat_template)
    return ChatBody(**shared, messages=messages, tools=body.tools or None), ignored


def chat_of_prompt(body: OllamaGenerateBody, chat_template: str) -> tuple[ChatBody, list[str]]:
    """A question as a chat, and what was passed over. Raises ApiError."""
    _require_text_alone(body)
    shared, ignored = _common_fields(body, chat_template)
    said = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*said, {"role": "user", "content": body.prompt}]
    return ChatBody(**shared, messages=messages), ignored


def order_of_text(body: OllamaGenerateBody, name: str, unknown: Sequence[str]) -> AnswerOrder:
    """A text that is gone on with as it stands. Raises ApiError."""
    _require_text_alone(body)
    shared, ignored = _common_fields(body, "")
    return AnswerOrder(
        [body.prompt],
        chat_params(ChatBody(**shared, messages=[])),
        model=name,
        manner=Manner(body.stream is not False, ignored=[*unknown, *ignored]),
    )


def _common_fields(body: OllamaBody, chat_template: str) -> tuple[dict[str, Any], list[str]]:
    """The fields of a chat's body, and what was passed over."""
    if body.logprobs:
        message = "logprobs is not supported by this route; /v1/chat/completions tells them"
        raise ApiError(400, message, param="logprobs")
    fields, ignored = _options_of(body.options or {})
    if body.format:
        fields["response_format"] = _form_of(body.format)
    thinking, more = _thinking_of(body.think, chat_template)
    fields |= thinking
    return {**fields, "model": body.model, "stream": body.stream is not False}, ignored + more


def _options_of(options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """How an answer is sampled, with Ollama's own defaults. Raises ApiError."""
    fields: dict[str, Any] = dict(_DEFAULTS)
    ignored: list[str] = []
    for name, value in options.items():
        if value is None or name in HARMLESS:
            continue
        if name in SAMPLED:
            fields[SAMPLED[name]] = value
        elif name in REFUSED:
            if not any(value == same and type(value) is type(same) for same in REFUSED[name]):
                only = " or ".join(as_json(same) for same in REFUSED[name])
                message = f"options.{name} is not supported by this server; it may be {only}"
                raise ApiError(400, message, param="options")
        else:
            ignored.append(f"options.{name}")
    if isinstance(most := fields.get("max_tokens"), int) and most < 0:
        fields["max_tokens"] = _ENDLESS  # -2, until the context is full, is the same here
    try:  # the types of a body that is made here are not looked at otherwise
        msgspec.convert(fields | {"messages": []}, ChatBody)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"options: {error}".replace("`$.", "`"), param="options") from error
    return fields, ignored


def _form_of(given: str | dict[str, Any]) -> ResponseFormat:
    if isinstance(given, dict):
        return ResponseFormat("json_schema", schema=given)
    if given != "json":
        message = f"format is {reprlib.repr(given)}, but must be 'json' or a schema"
        raise ApiError(400, message, param="format")
    return ResponseFormat("json_object")


def _thinking_of(given: bool | str | None, chat_template: str) -> tuple[dict[str, Any], list[str]]:
    """How much is to be thought. A wish that a model cannot heed is passed over: a template without
    thoughts has none to leave out."""
    if given is None or not has_thoughts(chat_template):
        return {}, ["think"] if given else []
    if isinstance(given, str):
        if given not in EFFORTS:
            message = (
                f"think is {reprlib.repr(given)}, but must be true, false, low, medium or high"
            )
            raise ApiError(400, message, param="think")
        return {"reasoning_effort": given}, []
    try:
        return {"chat_template_kwargs": variables(chat_template, "on" if given else "off")}, []
    except BadSetting:
        return {}, ["think"]


def _message_of(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message as a chat has it. Raises ApiError."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ApiError(
            400,
            f"{where}.role is {reprlib.repr(role)}, but must be system, user, assistant or tool",
            param="messages",
        )
    if content is not None and not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be a text", param="messages")
    if message.get("images"):
        problem = f"{where}.images: models are served that read and write text"
        raise ApiError(400, problem, param="messages")
    made: dict[str, Any] = {"role": role, "content": content or ""}
    if isinstance(thought := message.get("thinking"), str) and thought:
        made["reasoning_content"] = thought
    if isinstance(name := message.get("tool_name") or message.get("name"), str):
        made["name"] = name
    if isinstance(number := message.get("tool_call_id"), str):
        made["tool_call_id"] = number
    if calls := message.get("tool_calls"):
        made["tool_calls"] = _calls_of(calls, f"{where}.tool_calls")
    return made


def _calls_of(calls: Any, where: str) -> list[dict[str, Any]]:
    """Calls as a chat has them, their arguments as text. Raises ApiError."""
    made = []
    for place, call in enumerate(calls if isinstance(calls, Sequence) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            message = f"{where}[{place}] has no function with a name"
            raise ApiError(400, message, param="messages")
        assert isinstance(function, dict)
        given = function.get("arguments")
        given = {} if given is None else given
        text = given if isinstance(given, str) else as_json(given)
        number = call.get("id") if isinstance(call.get("id"), str) else f"call_{place}"
        own = {"name": name, "arguments": text}
        made.append({"id": number, "type": "function", "function": own})
    return made


def _require_text_alone(body: OllamaGenerateBody) -> None:
    """Raises ApiError for what would be another answer than the one to the prompt."""
    for name, instead in (
        ("suffix", ""),
        ("template", "; start the server with --chat-template"),
        ("images", "; models are served that read and write text"),
        ("context", "; /api/chat takes a conversation"),
    ):
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported by this server{instead}", param=name)
