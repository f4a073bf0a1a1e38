"""What goes through the pipes between the engine and the helper that renders chat templates.

A frame is four bytes of length, little-endian, and a msgpack struct. The parent sends one `Setup`,
then one `Render` at a time. The helper says once that it is ready, then whether the template
compiles, then answers each `Render`; each of these is a `Reply`.
"""

from __future__ import annotations

from typing import IO

import msgspec

HEADER_BYTES = 4


class Setup(msgspec.Struct):
    """What stays the same for the life of a helper."""

    template: str
    variables: dict[str, str]
    cpu_seconds: int
    memory_bytes: int


class Render(msgspec.Struct):
    messages: list[dict[str, str]]
    add_generation_prompt: bool
    max_output_bytes: int


class Reply(msgspec.Struct):
    """`error` is one printable line or empty; after a `fatal` one the helper must be replaced."""

    text: str = ""
    error: str = ""
    fatal: bool = False


def write_frame(pipe: IO[bytes], struct: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(struct)
    pipe.write(len(body).to_bytes(HEADER_BYTES, "little") + body)
    pipe.flush()


def read_frame(pipe: IO[bytes], max_bytes: int) -> bytes:
    """The body of the next frame; raises EOFError at the end, ValueError above `max_bytes`."""
    header = pipe.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise EOFError("the pipe ended")
    num_bytes = int.from_bytes(header, "little")
    if num_bytes > max_bytes:
        raise ValueError(f"a frame of {num_bytes} bytes, but at most {max_bytes} are allowed")
    body = pipe.read(num_bytes)
    if len(body) < num_bytes:
        raise EOFError("the pipe ended within a frame")
    return body
