"""The route of a doctor's report as a page; `links.py` says who may follow it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from hypocenter.server.api_error import ApiError
from hypocenter.server.routes import service_of


async def report(request: Request) -> Response:
    """GET /report/NAME. Raises ApiError, which tells nobody without a link what there is."""
    service, name = service_of(request), request.path_params["name"]
    given = request.query_params
    if not service.links.allows(name, given.get("until", ""), given.get("code", "")):
        raise ApiError(403, "this link is too old, or none of this server; take a new one at /live")
    page = service.faults.page_of(name)
    if page is None:
        raise ApiError(404, f"there is no report {name!r} any more", code="report_not_found")
    headers = {
        "Cache-Control": "no-store",
        # The page's own policy allows its one sheet of styles, and nothing else.
        "Content-Security-Policy": "frame-ancestors 'none'; sandbox",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(page, 200, headers, "text/html; charset=utf-8")
