"""A stream of an answer that goes on at another server when its own one is lost.

Each piece is asked for with the ids of its tokens. Another server is sent the same body with the
ids that came, as `resume_token_ids`, and its first piece is the one that would have come. A seed is
chosen here where the client gave none, or the other server would draw other tokens.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

#: The code of `hypo serve` for a request whose server ends, or can start no worker.
_GONE = "worker_gone"
_DATA, _DONE = b"data: ", b"data: [DONE]"
_MAX_SEED = (1 << 53) - 1  # exact in every client's JSON


def as_object(data: bytes) -> dict[str, Any] | None:
    """The object that a body holds; None: it holds none, and whoever is asked says so."""
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    return body if isinstance(body, dict) else None


def with_seed(body: dict[str, Any]) -> dict[str, Any]:
    """The body with a seed, so that two servers draw the same tokens."""
    return body if body.get("seed") is not None else {**body, "seed": random.randint(0, _MAX_SEED)}


def prefix_of(body: dict[str, Any]) -> bytes:
    """What a prompt begins with, as far as servers have it in common: for the choice of one."""
    names = ("cache_salt", "tools", "messages", "prompt")
    begun = {name: body[name] for name in names if body.get(name)}
    return msgspec.json.encode(begun)


class AnswerStream:
    """What a client was sent of one answer, and what another server is to be asked for the rest."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = with_seed(body)
        self._shows_ids = body.get("return_token_ids") is True
        self._sent_ids: list[int] = [*(body.get("resume_token_ids") or ())]
        self._identity: dict[str, Any] = {}
        self._has_sent = False
        #: Whether its end was sent, or an error that no other server can mend.
        self.is_over = False

    @property
    def can_go_on(self) -> bool:
        """Whether another server can go on with it: there is one answer, or nothing was sent."""
        prompt = self._body.get("prompt")
        is_one = not isinstance(prompt, list) or (bool(prompt) and isinstance(prompt[0], int))
        is_plain = is_one and self._body.get("n") in (None, 1) and not self._body.get("echo")
        return not self.is_over and (is_plain or not self._has_sent)

    def body(self) -> bytes:
        """What the server is asked that goes on from here."""
        asked = {**self._body, "return_token_ids": True}
        if self._sent_ids:
            asked["resume_token_ids"] = self._sent_ids
        return msgspec.json.encode(asked)

    def take(self, lines: bytes) -> bytes:
        """What the client is sent of whole events that a server sent."""
        return b"".join(self._event(event) for event in lines.split(b"\n\n") if event)

    def _event(self, event: bytes) -> bytes:
        if event.startswith(_DONE):
            self.is_over = True
        if event.startswith(_DONE) or not event.startswith(_DATA):
            return event + b"\n\n"
        said = msgspec.json.decode(event[len(_DATA) :])
        if not isinstance(said, dict) or "error" in said:
            self.is_over = True
            return event + b"\n\n"
        choices = said.get("choices") or []
        if self._has_sent and any("role" in choice.get("delta", ()) for choice in choices):
            return b""  # the other server opens the answer once more
        if not self._identity:
            self._identity = {name: said[name] for name in ("id", "created") if name in said}
        said.update(self._identity)
        for choice in choices:
            ids = choice.get("token_ids") if self._shows_ids else choice.pop("token_ids", None)
            self._sent_ids += ids or ()
        self._has_sent = True
        return _DATA + msgspec.json.encode(said) + b"\n\n"


def is_of_lost_server(lines: bytes) -> bool:
    """Whether an event says that the server itself ends or lost its model."""
    for event in lines.split(b"\n\n"):
        if event.startswith(_DATA) and not event.startswith(_DONE):
            said = msgspec.json.decode(event[len(_DATA) :])
            error = said.get("error") if isinstance(said, dict) else None
            if isinstance(error, dict) and error.get("code") == _GONE:
                return True
    return False
