"""/lora-adapters: which adapters a model has, and what they count for requests that do not say.

Both are llama-server's. To change it changes the answers of others: where there are keys, it needs
the admin's.
"""

from __future__ import annotations

from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response

from hypocenter.server.answers import Adapter, Done
from hypocenter.server.api_error import ApiError, json_response
from hypocenter.server.fields import LoraItem
from hypocenter.server.intake.json_bounds import decode
from hypocenter.server.routes import raw_body_of, service_by_query, service_of
from hypocenter.settings.adapters import MAX_ADAPTERS


async def adapters(request: Request) -> Response:
    """GET /lora-adapters; only who may see all sees folders."""
    service = service_by_query(request)
    served, sees_all = service.adapters, request.state.may_see_all
    return json_response(
        [
            Adapter(number, choice.name, _path_for(choice.path, sees_all=sees_all), scale)
            for number, (choice, scale) in enumerate(
                zip(served.choices, served.scales, strict=True)
            )
        ]
    )


async def change(request: Request) -> Response:
    """POST /lora-adapters: those that are not listed count nothing from now on."""
    if not request.state.may_see_all:
        said = "the admin key (--admin-key) is needed: this changes the answers of all clients"
        raise ApiError(403, said)
    service = service_by_query(request)
    data = await raw_body_of(request)
    async with service_of(request).bodies.decoding(len(data)):
        items = decode(data, list[LoraItem])
    if len(items) > MAX_ADAPTERS:
        raise ApiError(400, f"{len(items)} adapters are listed, but at most {MAX_ADAPTERS} may be")
    service.adapters.set_scales(items)
    return json_response(Done())


def _path_for(path: str, *, sees_all: bool) -> str:
    return path if sees_all else PurePath(path).name
