"""Messages between two processes of ours: frames of a length and a msgpack struct.

A frame is four bytes of length, little-endian, and the body. Nothing but msgpack is ever read, so
no message can run code. Every reader names the most bytes that it believes.
"""

from __future__ import annotations

from typing import IO

import msgspec

LENGTH_BYTES = 4


def as_frame(message: msgspec.Struct) -> bytes:
    """The bytes of one message."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def body_bytes(header: bytes, max_bytes: int) -> int:
    """How long a body is; raises EOFError where the header is cut off, ValueError above the max."""
    if len(header) < LENGTH_BYTES:
        raise EOFError("the pipe ended")
    num_bytes = int.from_bytes(header, "little")
    if num_bytes > max_bytes:
        raise ValueError(f"a frame of {num_bytes} bytes, but at most {max_bytes} are allowed")
    return num_bytes


def write_frame(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Write one message at once."""
    pipe.write(as_frame(message))
    pipe.flush()


def read_frame(pipe: IO[bytes], max_bytes: int) -> bytes:
    """The body of the next frame; raises EOFError at the end, ValueError above `max_bytes`."""
    num_bytes = body_bytes(pipe.read(LENGTH_BYTES), max_bytes)
    body = pipe.read(num_bytes)
    if len(body) < num_bytes:
        raise EOFError("the pipe ended within a frame")
    return body
