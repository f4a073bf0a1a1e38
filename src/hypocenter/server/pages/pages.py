"""`/`, `/live` and the files that they load; what is in them is never made from a text of others.

Stands before the guard of keys, since a browser sends none for what it loads. Who does not ask for
a page is passed on, so each address still means to an API's client what it meant.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hypocenter.base.package import ASSETS

#: Of addresses to the documents behind them.
DOCUMENTS = {"/": "index.html", "/live": "live.html"}
#: Below it lies what documents load.
FILES_PATH = "/page/"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
#: Scripts and styles of this server alone, none within a document; no text becomes HTML, for no
#: policy of trusted types may be made; no other site may show the page in a frame.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    # Asked after each time, and sent again only where it has changed.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent."""

    body: bytes
    media_type: str
    etag: str


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """The files by name."""
    found = {}
    for path in sorted((ASSETS / "page").iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.name] = PageFile(body, _TYPES[path.suffix], etag)
    return found


class Pages:
    """Answers who asks for a page or for a file of one, and passes everybody else on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._files = app, page_files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self._file_for(scope) if scope["type"] == "http" else None
        if file is None:
            await self._app(scope, receive, send)
            return
        headers = {**_HEADERS, "ETag": file.etag}
        if file.etag in _header(scope, b"if-none-match"):
            answer = Response(status_code=304, headers=headers)
        else:
            answer = Response(file.body, 200, headers, file.media_type)
        await answer(scope, receive, send)

    def _file_for(self, scope: Scope) -> PageFile | None:
        if scope["method"] not in ("GET", "HEAD"):
            return None
        path = scope["path"]
        if path in DOCUMENTS:
            wants_html = "text/html" in _header(scope, b"accept")
            return self._files[DOCUMENTS[path]] if wants_html else None
        if path.startswith(FILES_PATH):
            return self._files.get(path.removeprefix(FILES_PATH))
        return None


def is_visit(scope: Scope) -> bool:
    """Whether a person goes to a page, perhaps by a link of another site.

    What a browser tells of that: https://www.w3.org/TR/fetch-metadata/.
    """
    return (
        scope["method"] == "GET"
        and scope["path"] in DOCUMENTS
        and _header(scope, b"sec-fetch-mode") == "navigate"
        and _header(scope, b"sec-fetch-dest") == "document"
    )


def _header(scope: Scope, name: bytes) -> str:
    found = (value for key, value in scope["headers"] if key == name)
    return next(found, b"").decode("latin-1").lower()
