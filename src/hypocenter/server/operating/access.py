"""A line of the log for each request, and the prefix below which a proxy may have put the server.

Both stand around the application, so a refusal has its line as well. What is no HTTP never comes
here (`connection.py`). No prompt, no answer and no key is told: of a key the first digits of its
digest.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hypocenter.server.inquiry import Inquiry
from hypocenter.server.operating.log import escape, since

#: Digits of a key's digest that are told: `printf %s KEY | sha256sum` begins with them.
KEY_DIGITS = 8
#: What probes ask all the time: told at level debug, unless the answer is an error.
_PROBES = frozenset({"/health", "/ready", "/metrics"})
#: Files of pages, which a browser asks for with each page.
_FILES = "/page/"
_MAX_PATH_CHARS = 200

log = logging.getLogger("hypocenter.access")


class AccessLog:
    """Tells of each request once it is answered, or its client has left.

    `scope["state"]` is where others leave what is to be told: `key_digest`, of the key that let it
    in, and `inquiry`, what the model was asked.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        began, path = time.monotonic(), scope["path"]
        status, name = 0, ""

        async def note(message: Message) -> None:
            nonlocal status, name
            if message["type"] == "http.response.start":
                status = message["status"]
                name = dict(message["headers"]).get(b"x-request-id", b"").decode("latin-1")
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            status = status or 500  # Starlette answers it, and uvicorn logs the traceback
            raise
        finally:
            is_probe = (path in _PROBES or path.startswith(_FILES)) and status < 400
            level = logging.DEBUG if is_probe else logging.INFO
            if log.isEnabledFor(level):
                data = {
                    "peer": scope["client"][0] if scope.get("client") else "unix",
                    "key": state["key_digest"][:KEY_DIGITS] if "key_digest" in state else None,
                    "method": scope["method"],
                    "path": path[:_MAX_PATH_CHARS],
                    "status": status,
                    **_of_inquiry(state.get("inquiry"), began),
                    "seconds": since(began),
                    "request_id": name,
                }
                log.log(level, "%s", _as_text(data), extra={"event": "request", "data": data})
            # A connection keeps the scope of its last request, which would keep the whole answer.
            state.clear()


def _of_inquiry(inquiry: Inquiry | None, began: float) -> dict[str, Any]:
    """What the model was asked and said; each is None for a request that asks no model.

    `outcome`: completed, failed, or cancelled, where the client left or somebody ended it.
    """
    if inquiry is None:
        names = ("prompt_tokens", "cached_tokens", "output_tokens", "ttft_seconds", "outcome")
        return dict.fromkeys((*names, "resumed"))
    usage = inquiry.usage()
    firsts = [choice.generation.first_token for choice in inquiry.choices]
    first = min((moment for moment in firsts if moment is not None), default=None)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "ttft_seconds": None if first is None else round(first - began, 3),
        "outcome": inquiry.outcome,
        "resumed": sum(choice.generation.num_resumed for choice in inquiry.choices),
    }


def _as_text(data: dict[str, Any]) -> str:
    """As words between blanks. What a client chose has no blank and no line end in it."""
    path = escape(data["path"]).replace(" ", "\\x20")
    key = "" if data["key"] is None else f" key={data['key']}"
    words = [f"{data['peer']}{key} {data['method']} {path} {data['status']}"]
    if data["outcome"] is not None:
        ttft = data["ttft_seconds"]
        words.append(f"prompt={data['prompt_tokens']} cached={data['cached_tokens']}")
        words.append(f"output={data['output_tokens']} ttft={'-' if ttft is None else ttft}")
        words.append(data["outcome"])
        if data["resumed"]:
            words.append(f"resumed={data['resumed']}")
    words.append(f"seconds={data['seconds']} id={data['request_id']}")
    return " ".join(words)


class Prefix:
    """Takes `--root-path` off a request's path, for a proxy that leaves it there.

    A path without it is taken as it is, for a proxy that takes it off. So nobody behind this sees
    the prefix: whoever guards a path guards the one that is answered.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._prefix)}
            raw = self._prefix.encode()
            if scope.get("raw_path", b"").startswith(raw):
                scope["raw_path"] = scope["raw_path"].removeprefix(raw)
        await self._app(scope, receive, send)
