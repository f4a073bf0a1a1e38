"""The bodies of OpenAI's requests: which fields there are, what may stand in them, what is refused.

A field is honoured, or refused by name, or known to change nothing. The names are those of OpenAI,
vLLM and llama-server where they agree. What no documentation names is passed over, and the answer
says so in the header `x-ignored-fields`.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, TypeVar

import msgspec

from hypocenter.config import MAX_LOGPROBS, SamplingParams
from hypocenter.errors import BadSetting, UsageError
from hypocenter.server.api_error import ApiError

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


class ResponseFormat(msgspec.Struct):
    type: str = "text"


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
    # of vLLM and llama-server
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None


class CompletionBody(_Body, kw_only=True):
    #: A text, texts, token ids, or lists of those.
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


class ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


#: Of these only one value is possible here, which changes nothing.
_FIXED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "allowed_token_ids": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "web_search_options": (),
}
#: They are for whoever keeps accounts, and change no answer.
_HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "request_id", "priority", "cache_prompt", "verbosity",
    }
)  # fmt: skip
_BodyType = TypeVar("_BodyType", CompletionBody, ChatBody)


def read_body(data: bytes, kind: type[_BodyType]) -> tuple[_BodyType, list[str]]:
    """The body, and the names of fields that nobody knows. Raises ApiError, status 400."""
    raw = decode(data, dict[str, msgspec.Raw])
    unknown = []
    for name in raw.keys() - set(kind.__struct_fields__):
        if name in _FIXED:
            _require_fixed(name, decode(raw[name], Any))
        elif name not in _HARMLESS:
            unknown.append(name)
    return decode(data, kind), sorted(unknown)


def decode(data: bytes | msgspec.Raw, kind: Any) -> Any:
    """What JSON says, as `kind`. Raises ApiError, status 400, that names the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _as_api_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is no JSON that can be read: {why}") from error


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


def num_choices(body: CompletionBody | ChatBody) -> int:
    """`n`, within bounds. Raises ApiError."""
    num = 1 if body.n is None else body.n
    if not 1 <= num <= MAX_CHOICES:
        raise ApiError(400, f"n is {num}, but must be from 1 to {MAX_CHOICES}", param="n")
    return num


def prompts_of(body: CompletionBody) -> list[str | tuple[int, ...]]:
    """Each prompt, a text or token ids. Raises ApiError."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    kinds = {type(one) for one in given}
    if len(kinds) > 1:
        raise ApiError(
            400, "prompt mixes texts, token ids and lists; give one kind", param="prompt"
        )
    prompts: list[str | tuple[int, ...]]
    if kinds == {int}:
        prompts = [tuple(one for one in given if isinstance(one, int))]
    else:
        prompts = [tuple(one) if isinstance(one, list) else str(one) for one in given]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ApiError(
            400,
            f"there are {len(prompts)} prompts, but must be 1 to {MAX_PROMPTS}",
            param="prompt",
        )
    return prompts


def _params(body: _Body, **more: Any) -> SamplingParams:
    if body.repetition_penalty is not None and body.repeat_penalty is not None:
        raise ApiError(400, "both repetition_penalty and repeat_penalty; give one")
    if body.response_format is not None and body.response_format.type != "text":
        raise ApiError(
            400,
            f"response_format is {body.response_format.type!r}, but this server can only give text",
            param="response_format",
        )
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
    }
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        return SamplingParams(**fields, stop=tuple(stop), **more)
    except BadSetting as error:
        raise ApiError(400, error.text_for(error.field), param=error.field) from error
    except UsageError as error:
        raise ApiError(400, str(error)) from error


def _seed(given: int | None) -> int:
    """Settled here, so that a worker that goes on draws what the first one would have drawn."""
    if given is None or given == -1:
        return secrets.randbits(_SEED_BITS)
    return given % (1 << 64)  # OpenAI's is signed


def _require_fixed(name: str, value: Any) -> None:
    allowed = _FIXED[name]
    if value is None or value in allowed:
        return
    only = f"; it may be {' or '.join(repr(one) for one in allowed)}" if allowed else ""
    raise ApiError(400, f"{name} is not supported by this server{only}", param=name)


def _as_api_error(error: msgspec.ValidationError) -> ApiError:
    # The sentence is msgspec's: "Expected `int`, got `str` - at `$.n`".
    text = str(error)
    found = re.search(r" - at `\$\.?([A-Za-z_]\w*)?", text)
    param = found[1] if found else None
    if missing := re.search(r"missing required field `(\w+)`", text):
        param = missing[1]
    return ApiError(400, text.replace("`$.", "`").replace("`$", "`the body"), param=param)
