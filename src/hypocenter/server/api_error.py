"""What went wrong, in the form that OpenAI's clients read: status, type, code, and the field.

https://platform.openai.com/docs/guides/error-codes/api-errors; the clients map the status to a
class, retry 408, 409, 429 and 5xx unless `x-should-retry` says false, and wait for `Retry-After`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from hypocenter.server.reading.readers import NO_READER, READERS_BUSY, UNREADABLE
from hypocenter.server.supervisor import QUARANTINED, WORKER_GONE
from hypocenter.wire.messages import Failed

RETRY_SECONDS = 2


class ApiError(Exception):
    """`param` is the field of the body that is wrong; `retry` whether the same may work later."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry: bool | None = None,
    ) -> None:
        self.status, self.message, self.kind = status, message, kind
        self.code, self.param, self.retry = code, param, retry
        super().__init__(message)

    @property
    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.kind, "param": self.param}
        return {"error": {**fields, "code": self.code}}

    def response(self, body: Any = None) -> Response:
        """The answer that says so; `body` is for clients of a form of their own."""
        headers = {}
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        if self.status in (429, 503):
            headers["Retry-After"] = str(RETRY_SECONDS)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body if body is None else body, self.status, headers)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


#: Kinds of failures of one request, as workers name them, to status and code.
_FAILURES: dict[str, tuple[int, str | None]] = {
    "ContextOverflow": (400, "context_length_exceeded"),
    "OutOfBlocks": (400, "context_length_exceeded"),
    "NoHostMemory": (503, "out_of_memory"),
    "UsageError": (400, None),
    "BadSetting": (400, None),
    "NoTokenLeft": (400, "no_token_left"),
    "TemplateError": (400, "bad_messages"),
    "TokenizerError": (400, "bad_text"),
    "TooMuchText": (400, "context_length_exceeded"),
    UNREADABLE: (400, "unreadable"),
    "GrammarError": (400, "grammar_failed"),
    "BadLogits": (500, "bad_logits"),
    QUARANTINED: (500, "quarantined"),
    WORKER_GONE: (503, "worker_gone"),
    NO_READER: (503, "no_reader"),
    READERS_BUSY: (429, "queue_full"),
}


def error_of(failed: Failed) -> ApiError:
    """What a client is told of a request that failed."""
    status, code = _FAILURES.get(failed.kind, (500, None))
    kind = "invalid_request_error" if status < 500 else "server_error"
    return ApiError(
        status,
        failed.message,
        kind="rate_limit_error" if status == 429 else kind,
        code=code,
        param=failed.field or None,
        retry=status in (429, 503) if status >= 429 else None,
    )


def unavailable(message: str) -> Response:
    """What probes are answered while nothing is taken, as llama-server has it."""
    error = {"code": 503, "message": message, "type": "unavailable_error", "param": None}
    return json_response({"error": error}, 503, {"Retry-After": "2"})
