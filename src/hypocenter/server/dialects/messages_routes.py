"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from hypocenter.server.api_error import json_response
from hypocenter.server.bodies.chat_fields import asked_answer, messages_of
from hypocenter.server.bodies.orders import order_of_chat, served_name
from hypocenter.server.dialects.messages_answers import TokenCount
from hypocenter.server.dialects.messages_body import MessagesBody, chat_of, shows_thoughts
from hypocenter.server.dialects.messages_form import MessageForm
from hypocenter.server.fields import read_body
from hypocenter.server.generation import AnswerOrder
from hypocenter.server.routes import (
    ask_reader,
    body_of,
    inquire,
    order_of,
    respond,
    service_of,
)
from hypocenter.wire.messages import ServedModel


async def create(request: Request) -> Response:
    """POST /v1/messages"""
    shows = True

    async def read(data: bytes, model: ServedModel, names: Sequence[str]) -> AnswerOrder:
        nonlocal shows
        body, unknown = await read_body(data, MessagesBody)
        shows = shows_thoughts(body)
        chat, ignored = chat_of(body, model.chat_template)
        return order_of_chat(chat, [*unknown, *ignored], model, names)

    order = await order_of(request, read)
    inquiry = inquire(request, "msg", order)
    form, manner = MessageForm(inquiry, order.model, shows_thoughts=shows), order.manner
    del order  # it may be large
    return await respond(request, inquiry, form, manner)


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens"""
    data = await body_of(request)
    service = service_of(request)
    async with service.bodies.decoding(len(data)):
        body, _ = await read_body(data, MessagesBody)
    facts = service.facts
    served_name(body.model, service.asked_names)
    chat, _ = chat_of(body, facts.chat_template)
    asked = asked_answer(chat, facts.chat_template)
    told = await ask_reader(
        request,
        messages=messages_of(chat.messages),
        template_variables=asked.template_variables,
        tools=asked.tools,
        continues=asked.continues,
        max_chars=facts.context_length * facts.longest_token_bytes,
        is_prompt=True,
    )
    return json_response(TokenCount(len(told.token_ids)))
