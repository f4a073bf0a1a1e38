"""`/v1/responses` as OpenAI has it: create, ask after, cancel and delete one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hypocenter.server.api_error import ApiError, json_response
from hypocenter.server.bodies.orders import order_of_chat
from hypocenter.server.dialects import responses_form
from hypocenter.server.dialects.response_store import KeptResponse
from hypocenter.server.dialects.responses_answers import Deleted, InputItems
from hypocenter.server.dialects.responses_body import ResponsesBody, chat_of, items_of
from hypocenter.server.dialects.responses_form import ResponseForm
from hypocenter.server.fields import read_body
from hypocenter.server.generation import AnswerOrder
from hypocenter.server.routes import (
    Service,
    client_of,
    inquire,
    order_of,
    respond,
    service_of,
)
from hypocenter.wire.messages import ServedModel

#: Of what a response was asked with.
ORDERS = "asc", "desc"


async def create(request: Request) -> Response:
    """POST /v1/responses"""
    service, client = service_of(request), client_of(request)
    found: list[tuple[ResponsesBody, list[dict[str, Any]]]] = []

    async def read(data: bytes, model: ServedModel, names: Sequence[str]) -> AnswerOrder:
        body, unknown = await read_body(data, ResponsesBody)
        chat, messages, ignored = chat_of(
            body,
            _earlier(request, body.previous_response_id),
            functools.partial(
                service.responses.find_item, client, sees_all=request.state.may_see_all
            ),
        )
        order = order_of_chat(chat, [*unknown, *ignored], model, names)
        body.input = ""  # what is read need not be kept as long as the answer takes
        found.append((body, [] if body.store is False else messages))
        return order

    order = await order_of(request, read)
    inquiry = inquire(request, "resp", order)
    body, messages = found[0]
    told = responses_form.ResponseTerms(
        body, order.model, messages, order.params.temperature, order.params.top_p
    )
    form = ResponseForm(
        inquiry, told, functools.partial(service.responses.put, client, inquiry.name)
    )
    manner = order.manner
    del order
    return await respond(request, inquiry, form, manner)


def _earlier(request: Request, name: str | None) -> list[dict[str, Any]]:
    """The conversation up to the end of that response. Raises ApiError for one that is not kept."""
    if name is None:
        return []
    kept = _find_kept(request, name)
    if kept is None:
        raise ApiError(
            400,
            f"previous_response_id is {name[:100]!r}, which is not kept here; send the whole "
            "conversation as input",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    messages: list[dict[str, Any]] = msgspec.json.decode(kept.messages)
    return messages


async def get(request: Request) -> Response:
    """GET /v1/responses/NAME"""
    if (given := request.query_params.get("stream", "false")) not in ("false", "0"):
        limit = "a response is streamed while it is made alone"
        raise ApiError(400, f"stream is {given[:100]}, but {limit}", param="stream")
    return _tell(request, request.path_params["name"])


async def input_items(request: Request) -> Response:
    """GET /v1/responses/NAME/input_items"""
    name = request.path_params["name"]
    kept = _find_kept(request, name)
    if kept is None:
        raise _unknown(name)
    messages: list[dict[str, Any]] = msgspec.json.decode(kept.messages)
    items = list(items_of(messages[: kept.num_asked], name))
    query = request.query_params
    if (order := query.get("order", "desc")) not in ORDERS:
        limit = f"must be {' or '.join(ORDERS)}"
        raise ApiError(400, f"order is {order[:100]!r}, but {limit}", param="order")
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise ApiError(400, f"after is {after[:100]!r}, which is no item of it", param="after")
        items = items[places[0] + 1 :]
    page = items[: _limit_of(query.get("limit", "20"))]
    return json_response(
        InputItems(
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=len(page) < len(items),
        )
    )


def _limit_of(given: str) -> int:
    limit = int(given) if given.isdecimal() and len(given) < 4 else 0
    if not 1 <= limit <= 100:
        raise ApiError(400, f"limit is {given[:100]!r}, but must be from 1 to 100", param="limit")
    return limit


async def cancel(request: Request) -> Response:
    """POST /v1/responses/NAME/cancel ends it with what it has; one that has ended stays."""
    name = request.path_params["name"]
    form = _open_form(request, name)
    if form is None:
        return _tell(request, name)
    service_of(request).open[name].end_early()
    return json_response(form.response("cancelled"))


async def delete(request: Request) -> Response:
    """DELETE /v1/responses/NAME"""
    service, name = service_of(request), request.path_params["name"]
    if _open_form(request, name) is not None:
        raise ApiError(409, f"{name!r} is being made; cancel it first", code="response_open")
    if _find_kept(request, name) is None:
        raise _unknown(name)
    service.responses.delete(name)
    return json_response(Deleted(id=name))


def _tell(request: Request, name: str) -> Response:
    if (form := _open_form(request, name)) is not None:
        return json_response(form.response("in_progress"))
    kept = _find_kept(request, name)
    if kept is None:
        raise _unknown(name)
    return Response(kept.response, media_type="application/json")


def _find_kept(request: Request, name: str) -> KeptResponse | None:
    store, sees_all = service_of(request).responses, request.state.may_see_all
    return store.get(client_of(request), name, sees_all=sees_all)


def _open_form(request: Request, name: str) -> ResponseForm | None:
    """That of a response that is being made, if who asks may see it."""
    service: Service = service_of(request)
    inquiry = service.open.get(name)
    if inquiry is None or not service.is_own(request, name):
        return None
    return inquiry.form if isinstance(inquiry.form, ResponseForm) else None


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"there is no response {name[:100]!r}", code="response_not_found")
