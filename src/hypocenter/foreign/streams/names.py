"""How a program spells its tensors and streams: the names that its frames have for them."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

_MAX_FRAMES, _MAX_NAMES, _MAX_PARTS = 8, 2000, 64


def _names_in(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Names and values of a frame, of those around it, and of their objects' attributes."""
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return
        module = frame.f_globals if frame.f_locals is not frame.f_globals else {}
        own = frame.f_locals.get("self")
        of_own = getattr(own, "__dict__", {})
        yield from [*frame.f_locals.items()][:_MAX_NAMES]
        yield from [(f"self.{name}", value) for name, value in of_own.items()][:_MAX_NAMES]
        yield from [*module.items()][:_MAX_NAMES]
        frame = frame.f_back


def _parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value, or what is in a short list."""
    if isinstance(value, list | tuple) and len(value) <= _MAX_PARTS:
        yield from ((f"{name}[{at}]", part) for at, part in enumerate(value))
    else:
        yield name, value


class StreamNames:
    """The program's names of streams, kept once they are found."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def of(self, frame: FrameType | None, stream: str) -> str:
        """`side` for a stream that the program calls so, else what it is."""
        if not stream.startswith("0x"):
            return "torch.cuda.default_stream()" if stream == "default" else stream
        if stream not in self._found and (name := _stream_name(frame, int(stream, 16))):
            self._found[stream] = name
        return self._found.get(stream, stream)


def _stream_name(frame: FrameType | None, number: int) -> str:
    for name, value in _names_in(frame):
        for spelled, part in _parts_of(name, value):
            is_stream = type(part).__name__.endswith("Stream")
            if is_stream and getattr(part, "cuda_stream", None) == number:
                return spelled
    return ""


def tensor_name(frame: FrameType | None, address: int) -> str:
    """What the program calls a tensor that begins there; "" where nothing is called so."""
    for name, value in _names_in(frame):
        if not hasattr(type(value), "untyped_storage") or name == "_":
            continue
        try:
            if value.data_ptr() == address:
                return name
        except Exception:  # a tensor without memory of its own
            continue
    return ""
