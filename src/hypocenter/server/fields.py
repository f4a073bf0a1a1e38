"""The bodies of OpenAI's requests: which fields there are, what may stand in them, what is refused.

A field is honoured, or refused by name, or known to change nothing (`field_table.py`). The names
are those of OpenAI, vLLM and llama-server where they agree. What no documentation names is passed
over, and the answer says so in the header `x-ignored-fields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from hypocenter.base.errors import ContextOverflow
from hypocenter.server.api_error import ApiError, error_of
from hypocenter.server.bodies.field_table import ALLOWED_IN_ONE, HARMLESS, REFUSED
from hypocenter.server.intake.json_bounds import decode, decode_body, fields_of
from hypocenter.server.reading.readers import MAX_WAITING_OF_CLIENT, SMALL
from hypocenter.settings.config import SamplingParams
from hypocenter.settings.setting import (
    Flag,
    RealNumber,
    Setting,
    SeveralTexts,
    TokenIds,
    ValueKind,
    Whole,
    settings_of,
)
from hypocenter.wire.messages import NO_REQUEST, Failed, ServedModel

MAX_CHOICES = 128
MAX_PROMPTS = 512

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
    regex: str | None = None
    choice: list[str] | None = None


class Reasoning(msgspec.Struct):
    """Ollama's and OpenRouter's way to ask for more or less thought."""

    effort: str | None = None


#: What a setting is in JSON, by its kind, and by its name where that is not all.
_OF_KIND: dict[type[ValueKind], Any] = {
    Whole: int,
    RealNumber: float,
    Flag: bool,
    SeveralTexts: list[str],
    TokenIds: list[TokenId],
}
_OF_NAME: dict[str, Any] = {
    "stop": str | list[str],
    # OpenAI's by text of the id, or llama-server's pairs; false is never.
    "logit_bias": dict[str, float | bool] | list[tuple[int | str, float | bool]],
}


def sampling_fields(declared: Mapping[str, Setting]) -> list[tuple[str, Any, None]]:
    """The fields of a body that are settings, as `msgspec.defstruct` wants them."""
    found: list[tuple[str, Any, None]] = []
    for name, setting in declared.items():
        if not setting.api_is_read_apart:
            value = _OF_NAME[name] if name in _OF_NAME else _OF_KIND[type(setting.kind)]
            found += [(field, value | None, None) for field in setting.api]
    return found


if TYPE_CHECKING:

    class _Sampling(msgspec.Struct):
        """What is read of it is read by name: `sampling_fields.py`."""
else:
    _Sampling = msgspec.defstruct(
        "_Sampling", sampling_fields(settings_of(SamplingParams)), kw_only=True
    )


class LoraItem(msgspec.Struct):
    """An adapter by its number, as llama-server has it, or by its name, and what it counts."""

    id: int | None = None
    name: str | None = None
    scale: float = 1.0


class SharedBody(_Sampling, kw_only=True):
    """The fields that all forms have, beside those of `_Sampling`."""

    model: str = ""
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    cache_salt: str | None = None
    max_tokens: int | None = None
    n_predict: int | None = None
    #: What adapters count; those that are not listed count nothing.
    lora: list[LoraItem] | None = None
    #: A longer prompt loses its beginning; -1: so much that there is room for an answer.
    truncate_prompt_tokens: int | None = None
    #: Of a client's own requests the lowest comes first, as in vLLM.
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    #: Ours: the first tokens of the answer, sent by another server; it goes on behind them.
    resume_token_ids: list[TokenId] | None = None
    # vLLM's names before `structured_outputs`
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class CompletionBody(SharedBody, kw_only=True):
    #: A text, texts, token ids, or lists of those.
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None


class ChatBody(SharedBody, kw_only=True):
    messages: list[dict[str, Any]]
    #: Variables of the template, as in vLLM and llama-server.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    #: The answer goes on with the last message, which `echo` repeats before it.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    echo: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None


_BodyType = TypeVar("_BodyType", bound=msgspec.Struct)


async def read_body(data: bytes | bytearray, kind: type[_BodyType]) -> tuple[_BodyType, list[str]]:
    """The body, and the names of fields that nobody knows. Raises ApiError, status 400."""
    raw = fields_of(data, kind)
    unknown = []
    for name in raw.keys() - set(kind.__struct_fields__):
        if name in REFUSED:
            _require_fixed(
                name, decode(raw[name], Any), "completions" if kind is CompletionBody else "chat"
            )
        elif name not in HARMLESS:
            unknown.append(name)
    return await decode_body(data, raw, kind), sorted(unknown)


def num_choices(body: CompletionBody | ChatBody) -> int:
    """`n`, within bounds. Raises ApiError."""
    num = 1 if body.n is None else body.n
    if not 1 <= num <= MAX_CHOICES:
        raise ApiError(400, f"n is {num}, but must be from 1 to {MAX_CHOICES}", param="n")
    return num


def prompts_of(body: CompletionBody, model: ServedModel) -> list[str | tuple[int, ...]]:
    """Each prompt, a text or token ids that `model` has room for. Raises ApiError."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if body.truncate_prompt_tokens is None:
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
    _require_readable(prompts)
    return prompts


def _require_readable(prompts: Sequence[str | tuple[int, ...]]) -> None:
    """What would be refused anyway, whenever it comes: no generations are made for that."""
    sizes = [len(prompt) for prompt in prompts if isinstance(prompt, str) and len(prompt) > SMALL]
    if len(sizes) > 1 and sum(sizes) > MAX_WAITING_OF_CLIENT:
        raise ApiError(
            413,
            f"the {len(prompts)} prompts have {sum(sizes)} characters, but at most "
            f"{MAX_WAITING_OF_CLIENT} may wait to be read; ask for fewer at once",
            code="body_too_large",
            param="prompt",
        )


def _require_room(given: Sequence[str | int | list[int]], model: ServedModel) -> None:
    """Said here too, for millions of ids are not worth being sent to a worker."""
    sizes = [len(part) for part in given if isinstance(part, list)]
    if given and isinstance(given[0], int):
        sizes.append(len(given))
    if sizes and max(sizes) > model.context_length:
        overflow = ContextOverflow(max(sizes), model.context_length, model.trained_length)
        raise error_of(Failed(NO_REQUEST, "ContextOverflow", str(overflow)))


def _require_fixed(name: str, value: Any, route: str) -> None:
    allowed, instead = REFUSED[name]
    allowed = ALLOWED_IN_ONE.get((name, route), allowed)
    if value is None or any(value == same and type(value) is type(same) for same in allowed):
        return
    only = f"; it may be {' or '.join(map(_as_json, allowed))}" if allowed else ""
    instead = f"; {instead}" if instead else ""
    raise ApiError(400, f"{name} is not supported by this server{only}{instead}", param=name)


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
