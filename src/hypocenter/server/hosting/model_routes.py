"""The routes of models: which there are, whether they are well, and loading and unloading them.

`/models/load` and `/models/unload` are llama-server's, behind the admin key.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from hypocenter.server import answers, side_routes
from hypocenter.server.api_error import ApiError, json_response, unavailable
from hypocenter.server.hosting.hosting import Hosting
from hypocenter.server.intake.json_bounds import decode_body, fields_of
from hypocenter.server.routes import raw_body_of, service_of


class ModelBody(msgspec.Struct):
    """`force`: also where it answers somebody, of /models/unload."""

    model: str
    force: bool = False


async def health(request: Request) -> Response:
    """Whether what is loaded goes on; needs no key. A model that is not loaded is no ill."""
    hosting = hosting_of(request)
    if not hosting.loads_on_demand:
        return await side_routes.health(request)
    if stuck := hosting.find_stuck():
        return unavailable(f"no worker of these models goes on: {', '.join(stuck)}")
    return json_response(answers.Health("ok"))


async def readiness(request: Request) -> Response:
    """Whether a new request would be taken; needs no key, as probes have none."""
    hosting = hosting_of(request)
    if not hosting.loads_on_demand:
        return await side_routes.readiness(request)
    if service_of(request).is_draining:
        return unavailable("the server is shutting down")
    if not hosting.is_ready:
        return unavailable("no model can be loaded")
    return json_response(answers.Status("ok"))


async def models(request: Request) -> Response:
    """GET /v1/models"""
    return json_response(answers.Models(data=hosting_of(request).cards()))


async def model(request: Request) -> Response:
    """GET /v1/models/NAME"""
    return json_response(hosting_of(request).card(request.path_params["name"]))


async def load(request: Request) -> Response:
    """POST /models/load waits until it is loaded."""
    body = await _read(request)
    await hosting_of(request).load(body.model)
    return json_response(answers.Done())


async def unload(request: Request) -> Response:
    """POST /models/unload waits until its memory is free."""
    body = await _read(request)
    await hosting_of(request).unload(body.model, is_forced=body.force)
    return json_response(answers.Done())


async def _read(request: Request) -> ModelBody:
    if not hosting_of(request).loads_on_demand:
        raise ApiError(
            400,
            "this server's one model is always loaded; name several, or --sleep-idle-seconds",
        )
    data = await raw_body_of(request)
    async with service_of(request).bodies.decoding(len(data)):
        return await decode_body(data, fields_of(data, ModelBody), ModelBody)


def hosting_of(request: Request) -> Hosting:
    hosting = request.app.state.hosting
    assert isinstance(hosting, Hosting)
    return hosting
