"""Logprobs as a worker says them and a server keeps them: packed, one token behind the other.

A large answer has millions of them. As objects each takes six times the memory, and what little
lives on among them keeps Python from giving it back. So a server makes objects of one token at a
time, while it writes an answer. Each token is a frame (`frames.py`) of a msgpack array.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from hypocenter.base.results import TokenLogprob, TopLogprob
from hypocenter.wire.frames import LENGTH_BYTES


class _Top(TopLogprob, frozen=True, array_like=True, gc=False):
    """It is packed without the names of its fields."""


class _Token(TokenLogprob, frozen=True, array_like=True, gc=False):
    top: tuple[_Top, ...]


_DECODER = msgspec.msgpack.Decoder(_Token | None)


def pack_logprobs(tokens: Iterable[TokenLogprob | None] | None) -> bytes:
    """The bytes of so many tokens; those of two answers joined are the bytes of both. None of
    `tokens`: nothing stands before a prompt's first one."""
    packed = bytearray()
    for token in tokens or ():
        body = msgspec.msgpack.encode(None if token is None else _as_tuple(token))
        packed += len(body).to_bytes(LENGTH_BYTES, "little") + body
    return bytes(packed)


def unpack_logprobs(packed: bytes | bytearray) -> Iterator[TokenLogprob | None]:
    """The tokens of these bytes, each made when it is asked for."""
    view, at = memoryview(packed), 0
    while at < len(view):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(view[at:start], "little")
        yield _DECODER.decode(view[start:at])


def _as_tuple(token: TokenLogprob) -> tuple[object, ...]:
    top = tuple(map(msgspec.structs.astuple, token.top))
    return token.token_id, token.piece, token.logprob, top
