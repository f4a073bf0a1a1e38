"""What a chat's body says beside how it is sampled: thoughts, tools, and the last message.

A wish that a model cannot heed is passed over and told of, where every client sends it to every
model; what would be another answer than the one asked for is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hypocenter.base.errors import BadSetting, UsageError
from hypocenter.conversation.call_formats import needs_types, text_parameters
from hypocenter.conversation.call_forms import FREE, CallRules, read_choice
from hypocenter.conversation.continuing import MessagePart, continued_part, text_of
from hypocenter.conversation.message_fields import CALLS, passed_over
from hypocenter.conversation.thoughts import (
    EFFORTS,
    FORMATS_READ,
    has_thoughts,
    reads_calls_of,
    require_variables,
    variables,
)
from hypocenter.conversation.tools import check_tools
from hypocenter.server.api_error import ApiError
from hypocenter.server.fields import ChatBody
from hypocenter.server.generation import AskedAnswer


def asked_answer(body: ChatBody, chat_template: str) -> AskedAnswer:
    """What is wanted of an answer. Raises ApiError, status 400, that names the field."""
    told, ignored = _template_variables(body, chat_template)
    tools, calls = _tools_of(body, chat_template)
    ignored += passed_over(body.messages, body.tools)
    if CALLS not in chat_template and any(message.get(CALLS) for message in body.messages):
        ignored.append(f"messages[].{CALLS}")  # the template shows none
    continues = part_to_continue(
        body.messages,
        chat_template,
        wanted=body.continue_final_message,
        adds_prompt=body.add_generation_prompt,
    )
    last = body.messages[-1]
    is_echoed = body.echo and last.get("role") == "assistant"
    echoed = text_of(last.get("content")) if is_echoed else ""
    adds_prompt = body.add_generation_prompt is not False
    types = text_parameters(tools) if needs_types(chat_template) else None
    return AskedAnswer(told, tools, types, calls, continues, adds_prompt, echoed, ignored)


def part_to_continue(
    messages: Sequence[dict[str, Any]],
    chat_template: str,
    *,
    wanted: bool | None,
    adds_prompt: bool | None,
) -> MessagePart:
    """The part of the last message that the answer goes on with. Raises ApiError.

    Both may be asked for, as many clients do that leave the other at its default; vLLM refuses
    that where both are given.
    """
    if not wanted:
        return ""
    if adds_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt are both true, but the answer is "
            "either a part of the last message or one of its own; give one of them",
            param="continue_final_message",
        )
    try:
        return continued_part(chat_template, messages)
    except UsageError as error:
        raise ApiError(400, str(error), param="messages") from error


def _template_variables(
    body: ChatBody, chat_template: str
) -> tuple[dict[str, Any] | None, list[str]]:
    """What the template is told beside the messages, and what is passed over of it.

    Raises ApiError for an effort that is none, and for no thought of a model that always thinks.
    """
    told: dict[str, Any] = {}
    ignored: list[str] = []
    name, effort = "reasoning_effort", body.reasoning_effort
    if effort is None and body.reasoning is not None:
        name, effort = "reasoning", body.reasoning.effort
    if effort is not None and effort not in EFFORTS:
        raise ApiError(
            400,
            f"{name} is {effort[:100]!r}, but must be one of {', '.join(EFFORTS)}",
            param=name,
        )
    # A model without thoughts has none to leave out.
    if effort is not None and (effort != "none" or has_thoughts(chat_template)):
        try:
            told = variables(chat_template, "off" if effort == "none" else effort)
        except BadSetting as error:
            if effort == "none":
                raise ApiError(
                    400, f"{name} is {effort!r}, but {error.limit}", param=name
                ) from error
            ignored.append(name)
    return told | checked_variables(body.chat_template_kwargs) or None, ignored


def _tools_of(
    body: ChatBody, chat_template: str
) -> tuple[tuple[dict[str, Any], ...] | None, CallRules]:
    """What the model may call, None where it is offered nothing, and how. Raises ApiError."""
    checked = checked_tools(body.tools)
    if body.tool_choice == "none":
        return None, FREE
    one_call = body.parallel_tool_calls is False
    try:
        calls = read_choice(body.tool_choice, checked, one_call=one_call)
    except UsageError as error:
        raise ApiError(400, str(error), param="tool_choice") from error
    if checked is not None and not reads_calls_of(chat_template):
        raise ApiError(400, f"tools must be left out: {FORMATS_READ}", param="tools")
    return checked, calls


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


def messages_of(messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The conversation, as a worker can be told of it. Raises ApiError."""
    try:
        msgspec.msgpack.encode(messages)
    except OverflowError as error:
        raise ApiError(400, "messages holds a number beyond 64 bits", param="messages") from error
    return tuple(messages)
