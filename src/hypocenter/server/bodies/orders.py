"""From the bytes of a body to the order that an answer is made by; knows nothing of HTTP.

A field that is wrong, or that names what is not served, is refused by ApiError.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.server.api_error import ApiError
from hypocenter.server.bodies.chat_fields import asked_answer, messages_of
from hypocenter.server.bodies.sampling_fields import chat_params, completion_params
from hypocenter.server.fields import (
    ChatBody,
    CompletionBody,
    LoraItem,
    num_choices,
    prompts_of,
    read_body,
)
from hypocenter.server.generation import AnswerOrder, Manner
from hypocenter.wire.messages import ServedModel

_MAX_SALT_CHARS = 256


async def read_completion(
    data: bytes, model: ServedModel, served_names: Sequence[str]
) -> AnswerOrder:
    """What a body of /v1/completions asks for. Raises ApiError."""
    body, unknown = await read_body(data, CompletionBody)
    name = served_name(body.model, served_names)
    prompts = prompts_of(body, model)
    return AnswerOrder(
        list(prompts),
        completion_params(body),
        cache_salt=_salt_of(body),
        num_choices=num_choices(body),
        model=name,
        is_echoed=bool(body.echo),
        lora=_lora_of(body),
        manner=_manner_of(body, unknown),
        max_prompt_tokens=_max_prompt_tokens(body, model),
        priority=body.priority or 0,
        sent_ids=_sent_ids_of(body, len(prompts)),
    )


async def read_chat(data: bytes, model: ServedModel, served_names: Sequence[str]) -> AnswerOrder:
    """What a body of /v1/chat/completions asks for. Raises ApiError."""
    body, unknown = await read_body(data, ChatBody)
    return order_of_chat(body, unknown, model, served_names)


def order_of_chat(
    body: ChatBody, unknown: Sequence[str], model: ServedModel, served_names: Sequence[str]
) -> AnswerOrder:
    """What a conversation asks for; `unknown` are fields that were passed over. Raises ApiError."""
    name = served_name(body.model, served_names)
    if not body.messages:
        raise ApiError(400, "messages is empty; give at least one", param="messages")
    params = chat_params(body)
    asked = asked_answer(body, model.chat_template)
    return AnswerOrder(
        [messages_of(body.messages)],
        params,
        cache_salt=_salt_of(body),
        num_choices=num_choices(body),
        model=name,
        asked=asked,
        lora=_lora_of(body),
        manner=_manner_of(body, [*unknown, *asked.ignored]),
        max_prompt_tokens=_max_prompt_tokens(body, model),
        priority=body.priority or 0,
        sent_ids=_sent_ids_of(body, 1),
    )


def served_name(name: str, served_names: Sequence[str]) -> str:
    """The name that answers bear. Raises ApiError for one that is not served.

    Ollama's clients put a tag behind it.
    """
    for known in (name, name.removesuffix(":latest")):
        if not known or known in served_names:
            return known or served_names[0]
    raise ApiError(
        404,
        f"the model {name[:200]!r} is not served here; name one of: {', '.join(served_names)}",
        code="model_not_found",
        param="model",
    )


def _lora_of(body: ChatBody | CompletionBody) -> tuple[LoraItem, ...] | None:
    return None if body.lora is None else tuple(body.lora)


def _salt_of(body: ChatBody | CompletionBody) -> str:
    salt = body.cache_salt or ""
    if len(salt) > _MAX_SALT_CHARS:
        raise ApiError(
            400, f"cache_salt has more than {_MAX_SALT_CHARS} characters", param="cache_salt"
        )
    return salt


def _manner_of(body: ChatBody | CompletionBody, ignored: list[str]) -> Manner:
    wants_usage = bool(body.stream_options and body.stream_options.include_usage)
    return Manner(bool(body.stream), wants_usage, ignored, bool(body.return_token_ids))


def _max_prompt_tokens(body: ChatBody | CompletionBody, model: ServedModel) -> int:
    """How many tokens of a prompt are kept; 0: all. Raises ApiError."""
    given = body.truncate_prompt_tokens
    if given is None:
        return 0
    if given == -1:
        return max(1, model.context_length - max(1, body.max_tokens or 1))
    if given < 1:
        raise ApiError(
            400,
            f"truncate_prompt_tokens is {given}, but must be at least 1, or -1 for what leaves "
            "room for an answer",
            param="truncate_prompt_tokens",
        )
    return given


def _sent_ids_of(body: ChatBody | CompletionBody, num_prompts: int) -> tuple[int, ...]:
    """Of an answer that goes on: the tokens before. Raises ApiError."""
    sent = tuple(body.resume_token_ids or ())
    if not sent:
        return ()
    most = next((n for n in (body.max_tokens, body.n_predict) if n is not None and n >= 0), None)
    problem = ""
    if num_prompts != 1 or num_choices(body) != 1:
        problem = "one prompt with n 1 can be gone on with"
    elif body.echo:
        problem = "echo was answered by whoever sent them; leave it out"
    elif not body.stream:
        problem = "what goes on is a stream; set stream"
    elif most is not None and len(sent) >= most:
        problem = f"there are {len(sent)}, and max_tokens is {most}: nothing is left to generate"
    if problem:
        raise ApiError(400, f"resume_token_ids: {problem}", param="resume_token_ids")
    return sent
