"""How the answers to a body are sampled: its fields as SamplingParams."""

from __future__ import annotations

import re
import reprlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.server.api_error import ApiError
from hypocenter.server.fields import ChatBody, CompletionBody, StructuredOutputs
from hypocenter.settings.config import MAX_LOGPROBS, SamplingParams
from hypocenter.settings.setting import SAME, settings_of

_SEED_BITS = 32
#: What completions generate when nobody says how much, as OpenAI and vLLM have it.
_COMPLETION_TOKENS = 16
#: What llama-server and LM Studio call an answer that goes on until it ends.
_ENDLESS = -1
#: The fields of a body that bound an answer; the last is llama-server's.
_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
_Body = ChatBody | CompletionBody


def completion_params(body: CompletionBody) -> SamplingParams:
    """How each answer is sampled, without a seed of its own. Raises ApiError."""
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise ApiError(
            400,
            f"logprobs is {body.logprobs}, but must be from 0 to {MAX_LOGPROBS}",
            param="logprobs",
        )
    max_tokens = _max_tokens(body, _COMPLETION_TOKENS)
    prompt_logprobs = body.logprobs if body.echo else None
    return _params(
        body, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
    )


def chat_params(body: ChatBody) -> SamplingParams:
    """How each answer is sampled, without a seed of its own. Raises ApiError."""
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
        max_tokens=_max_tokens(body, None),
        logprobs=(num_top or 0) if body.logprobs else None,
    )


def _max_tokens(body: _Body, default: int | None) -> int | None:
    """The one that is given; None: the answer goes on until it ends."""
    given = {name: value for name in _LIMITS if (value := getattr(body, name, None)) is not None}
    if len(set(given.values())) > 1:
        both = " and ".join(f"{name} {value}" for name, value in given.items())
        raise ApiError(400, f"{both} are given; give one of them", param=next(iter(given)))
    if not given:
        return default
    limit = next(iter(given.values()))
    return None if limit == _ENDLESS else limit


def _params(body: _Body, **more: Any) -> SamplingParams:
    fields = {name: value for name, value in _plain(body) if value is not None}
    try:
        return SamplingParams(**fields, **_form(body), **more)
    except BadSetting as error:
        raise ApiError(400, error.text_for(error.field), param=error.field) from error
    except UsageError as error:
        raise ApiError(400, str(error)) from error


def _plain(body: _Body) -> Iterator[tuple[str, Any]]:
    """Each setting that one field of a body says, and its value; None: it is left as it is."""
    for name, setting in settings_of(SamplingParams).items():
        if setting.api_is_read_apart or not setting.api:
            continue
        given = {field: getattr(body, field) for field in setting.api}
        given = {field: value for field, value in given.items() if value is not None}
        if len(given) > 1:
            raise ApiError(400, f"both {' and '.join(given)}; give one")
        value = next(iter(given.values()), None)
        if value is None and setting.api_default is not SAME:
            value = setting.api_default
        yield name, _READERS[name](value) if name in _READERS else value


def _stop(given: str | list[str] | None) -> Sequence[str] | None:
    return (given,) if isinstance(given, str) else given


def _top_k(given: int | None) -> int | None:
    """vLLM's -1 is off."""
    return None if given is None else max(given, 0)


def _logit_bias(given: Any) -> list[tuple[int, float | bool]] | None:
    """Pairs of token id and bias. Raises ApiError for a token that is not named by its id."""
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
            ("structured_outputs", "regex", given.regex),
            ("structured_outputs", "choice", given.choice),
            ("guided_json", "json_schema", body.guided_json),
            ("guided_grammar", "grammar", body.guided_grammar),
            ("guided_regex", "regex", body.guided_regex),
            ("guided_choice", "choice", body.guided_choice),
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


#: Settings whose field says more than its value does, to what makes the value of it.
_READERS: dict[str, Callable[[Any], Any]] = {
    "stop": _stop,
    "top_k": _top_k,
    "seed": _seed,
    "logit_bias": _logit_bias,
}
