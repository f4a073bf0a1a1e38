"""The bodies of OpenAI's requests: which fields there are, what may stand in them, what is refused.

A field is honoured, or refused by name, or known to change nothing. The names are those of OpenAI,
vLLM and llama-server where they agree. What no documentation names is passed over, and the answer
says so in the header `x-ignored-fields`.
"""

from __future__ import annotations

import re
import reprlib
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from hypocenter.config import MAX_LOGPROBS, SamplingParams
from hypocenter.conversation.thoughts import (
    EFFORTS,
    apart,
    reads_calls_of,
    require_variables,
    variables,
)
from hypocenter.conversation.tools import check_tools
from hypocenter.errors import BadSetting, ContextOverflow, UsageError
from hypocenter.messages import NO_REQUEST, Failed, ServedModel
from hypocenter.server.api_error import ApiError, error_of
from hypocenter.server.intake.json_bounds import decode, decode_body, fields_of

MAX_CHOICES = 128
MAX_PROMPTS = 512
_SEED_BITS = 32
#: What completions generate when nobody says how much, as OpenAI and vLLM have it.
_COMPLETION_TOKENS = 16

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct):
    """OpenAI's wrapper of a schema; what is not strict is kept to just as well."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`schema` is llama-server's way to give one; OpenAI's is `json_schema`."""

    type: str = "text"
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's way to ask for a form."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    grammar: str | None = None


class _Body(msgspec.Struct, kw_only=True):
    """The fields that both forms have."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    #: OpenAI's by text of the id, or llama-server's pairs; false is never.
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    # of vLLM and llama-server
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    min_tokens: int | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None


class CompletionBody(_Body, kw_only=True):
    #: A text, texts, token ids, or lists of those.
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


class ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    #: Variables of the template, as in vLLM and llama-server.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    #: OpenAI's others, "required" and the name of a function, would need a form for calls.
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


#: Of these only one value is possible here, which changes nothing.
_FIXED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "web_search_options": (),
}
#: They are for whoever keeps accounts, and change no answer.
_HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "request_id", "priority", "cache_prompt", "verbosity",
)  # fmt: skip
_BodyType = TypeVar("_BodyType", CompletionBody, ChatBody)


async def read_body(data: bytes | bytearray, kind: type[_BodyType]) -> tuple[_BodyType, list[str]]:
    """The body, and the names of fields that nobody knows. Raises ApiError, status 400."""
    raw = fields_of(data, kind)
    unknown = []
    for name in raw.keys() - set(kind.__struct_fields__):
        if name in _FIXED:
            _require_fixed(name, decode(raw[name], Any))
        elif name not in _HARMLESS:
            unknown.append(name)
    return await decode_body(data, raw, kind), sorted(unknown)


def completion_params(body: CompletionBody) -> SamplingParams:
    """How each answer is sampled, without a seed of its own. Raises ApiError."""
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise ApiError(
            400,
            f"logprobs is {body.logprobs}, but must be from 0 to {MAX_LOGPROBS}",
            param="logprobs",
        )
    max_tokens = _COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_logprobs = body.logprobs if body.echo else None
    return _params(
        body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
    )


def chat_params(body: ChatBody) -> SamplingParams:
    """How each answer is sampled, without a seed of its own. Raises ApiError."""
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise ApiError(
            400,
            f"max_tokens is {body.max_tokens}, but max_completion_tokens is "
            f"{body.max_completion_tokens}; give one of them",
            param="max_tokens",
        )
    num_top = body.top_logprobs
    if num_top is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if num_top is not None and not 0 <= num_top <= MAX_LOGPROBS:
        raise ApiError(
            400,
            f"top_logprobs is {num_top}, but must be from 0 to {MAX_LOGPROBS}",
            param="top_logprobs",
        )
    return _params(
        body,
        max_tokens=limits.pop() if limits else None,
        logprobs=(num_top or 0) if body.logprobs else None,
    )


def template_variables(body: ChatBody, chat_template: str) -> dict[str, Any] | None:
    """What the template is told beside the messages. Raises ApiError for an effort it has not."""
    told: dict[str, Any] = {}
    effort = body.reasoning_effort
    if effort is not None and effort not in EFFORTS:
        raise ApiError(
            400,
            f"reasoning_effort is {effort[:100]!r}, but must be one of {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    # A model without thoughts has none to leave out.
    if effort is not None and (effort != "none" or apart(chat_template, "") is not None):
        try:
            told = variables(chat_template, "off" if effort == "none" else effort)
        except BadSetting as error:
            raise ApiError(
                400, f"reasoning_effort is {effort!r}, but {error.limit}", param="reasoning_effort"
            ) from error
    return told | checked_variables(body.chat_template_kwargs) or None


def tools_of(body: ChatBody, chat_template: str) -> tuple[dict[str, Any], ...] | None:
    """What the model may call; None where it is offered nothing. Raises ApiError."""
    choice = body.tool_choice
    if choice not in (None, "none", "auto"):
        raise ApiError(
            400,
            f"tool_choice is {reprlib.repr(choice)}, but must be 'auto' or 'none'",
            param="tool_choice",
        )
    checked = checked_tools(body.tools)
    if checked is None or choice == "none":
        return None
    if not reads_calls_of(chat_template):
        raise ApiError(
            400, "tools must be left out: calls of this model are not read", param="tools"
        )
    return checked


def checked_tools(given: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...] | None:
    """Tools as they can be told to a worker. Raises ApiError."""
    try:
        checked = check_tools(given)
    except UsageError as error:
        raise ApiError(400, str(error), param="tools") from error
    return None if checked is None else tuple(checked)


def checked_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """Variables of a template as they can be told to a worker. Raises ApiError."""
    try:
        require_variables(given or {})
    except UsageError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs") from error
    return given or {}


def num_choices(body: CompletionBody | ChatBody) -> int:
    """`n`, within bounds. Raises ApiError."""
    num = 1 if body.n is None else body.n
    if not 1 <= num <= MAX_CHOICES:
        raise ApiError(400, f"n is {num}, but must be from 1 to {MAX_CHOICES}", param="n")
    return num


def prompts_of(body: CompletionBody, model: ServedModel) -> list[str | tuple[int, ...]]:
    """Each prompt, a text or token ids that `model` has room for. Raises ApiError."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    _require_room(given, model)
    kinds = {type(part) for part in given}
    if len(kinds) > 1:
        raise ApiError(
            400, "prompt mixes texts, token ids and lists; give one kind", param="prompt"
        )
    prompts: list[str | tuple[int, ...]]
    if kinds == {int}:
        prompts = [tuple(part for part in given if isinstance(part, int))]
    else:
        prompts = [tuple(part) if isinstance(part, list) else str(part) for part in given]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ApiError(
            400,
            f"there are {len(prompts)} prompts, but must be 1 to {MAX_PROMPTS}",
            param="prompt",
        )
    return prompts


def messages_of(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The conversation, as a worker can be told of it. Raises ApiError."""
    try:
        msgspec.msgpack.encode(messages)
    except OverflowError as error:
        raise ApiError(400, "messages holds a number beyond 64 bits", param="messages") from error
    return tuple(messages)


def _require_room(given: Sequence[str | int | list[int]], model: ServedModel) -> None:
    """Said here too, for millions of ids are not worth being sent to a worker."""
    sizes = [len(part) for part in given if isinstance(part, list)]
    if given and isinstance(given[0], int):
        sizes.append(len(given))
    if sizes and max(sizes) > model.context_length:
        overflow = ContextOverflow(max(sizes), model.context_length, model.trained_length)
        raise error_of(Failed(NO_REQUEST, "ContextOverflow", str(overflow)))


def _params(body: _Body, **more: Any) -> SamplingParams:
    if body.repetition_penalty is not None and body.repeat_penalty is not None:
        raise ApiError(400, "both repetition_penalty and repeat_penalty; give one")
    penalty = body.repetition_penalty or body.repeat_penalty
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    given: dict[str, Any] = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p,
        "top_k": max(body.top_k, 0) if body.top_k is not None else None,  # vLLM: -1 is off
        "min_p": body.min_p,
        "repeat_penalty": penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "ignore_eos": body.ignore_eos,
        "seed": _seed(body.seed),
        "logit_bias": _logit_bias(body),
        "min_tokens": body.min_tokens,
        "stop_token_ids": body.stop_token_ids,
        "allowed_token_ids": body.allowed_token_ids,
        "bad_words": body.bad_words,
        **_form(body),
    }
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(**fields, stop=tuple(stop), **more)
    except BadSetting as error:
        raise ApiError(400, error.text_for(error.field), param=error.field) from error
    except UsageError as error:
        raise ApiError(400, str(error)) from error


def _logit_bias(body: _Body) -> list[tuple[int, float | bool]] | None:
    """Pairs of token id and bias. Raises ApiError for a token that is not named by its id."""
    given = body.logit_bias
    if given is None:
        return None
    pairs = given.items() if isinstance(given, dict) else given
    return [(_id_of(token), bias) for token, bias in pairs]


def _id_of(token: int | str) -> int:
    if isinstance(token, int):
        return token
    if not re.fullmatch("[0-9]{1,10}", token, re.ASCII):
        shown = reprlib.repr(token)
        raise ApiError(
            400,
            f"logit_bias names {shown}, but tokens are named by their ids; /tokenize tells them",
            param="logit_bias",
        )
    return int(token)


def _form(body: _Body) -> dict[str, Any]:
    """The form that answers are held to, as SamplingParams name it. Raises ApiError."""
    found: list[tuple[str, str, Any]] = []
    asked = body.response_format
    if asked is not None:
        wrapped = asked.schema if asked.json_schema is None else asked.json_schema.schema
        match asked.type:
            case "text":
                pass
            case "json_object":
                is_any = wrapped is None
                found.append(
                    ("response_format", "json_object" if is_any else "json_schema", wrapped or True)
                )
            case "json_schema" if wrapped is not None:
                found.append(("response_format", "json_schema", wrapped))
            case "json_schema":
                raise ApiError(
                    400, "response_format.json_schema has no schema", param="response_format"
                )
            case other:
                raise ApiError(
                    400,
                    f"response_format.type is {other!r}, but must be text, json_object or "
                    "json_schema",
                    param="response_format",
                )
    given = body.structured_outputs or StructuredOutputs()
    found += [
        (where, name, value)
        for where, name, value in (
            ("structured_outputs", "json_schema", given.json),
            ("structured_outputs", "json_object", given.json_object or None),
            ("structured_outputs", "grammar", given.grammar),
            ("json_schema", "json_schema", body.json_schema),
            ("grammar", "grammar", body.grammar or None),
        )
        if value is not None
    ]
    if len(found) > 1:
        both = " and ".join(where for where, _, _ in found)
        raise ApiError(400, f"{both} ask for a form each; give one", param=found[-1][0])
    return {name: value for _, name, value in found}


def _seed(given: int | None) -> int:
    """Settled here, so that a worker that goes on draws what the first one would have drawn."""
    if given is None or given == -1:
        return secrets.randbits(_SEED_BITS)
    return given % (1 << 64)  # OpenAI's is signed


def _require_fixed(name: str, value: Any) -> None:
    allowed = _FIXED[name]
    if value is None or value in allowed:
        return
    only = f"; it may be {' or '.join(repr(value) for value in allowed)}" if allowed else ""
    raise ApiError(400, f"{name} is not supported by this server{only}", param=name)
