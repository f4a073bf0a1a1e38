"""How a program spells its tensors and streams: the names that its frames have for them."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

_MAX_FRAMES, _MAX_NAMES = 8, 2000


def _named(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Names and values of a frame, of those around it, and of their objects' attributes."""
    num = 0
    while frame is not None and num < _MAX_FRAMES:
        num += 1
        module = frame.f_globals if frame.f_locals is not frame.f_globals else {}
        for scope in (frame.f_locals, module):
            for name, value in [*scope.items()][:_MAX_NAMES]:
                yield name, value
                if name == "self":
                    for inner, held in [*getattr(value, "__dict__", {}).items()][:_MAX_NAMES]:
                        yield f"self.{inner}", held
        frame = frame.f_back


class StreamNames:
    """The program's names of streams, kept once they are found."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def of(self, frame: FrameType | None, stream: str) -> str:
        """`side` for a stream that the program calls so, else what it is."""
        if not stream.startswith("0x"):
            return "torch.cuda.default_stream()" if stream == "default" else stream
        if stream not in self._found:
            number = int(stream, 16)
            for name, value in _named(frame):
                if type(value).__name__.endswith("Stream"):
                    if getattr(value, "cuda_stream", None) == number:
                        self._found[stream] = name
                        break
                elif isinstance(value, list | tuple) and len(value) <= 64:
                    for at, one in enumerate(value):
                        is_stream = type(one).__name__.endswith("Stream")
                        if is_stream and getattr(one, "cuda_stream", None) == number:
                            self._found[stream] = f"{name}[{at}]"
        return self._found.get(stream, stream)


def tensor_name(frame: FrameType | None, address: int) -> str:
    """What the program calls a tensor that begins there; "" where nothing is called so."""
    for name, value in _named(frame):
        if not hasattr(type(value), "untyped_storage") or name == "_":
            continue
        try:
            if value.data_ptr() == address:
                return name
        except Exception:  # a tensor without memory of its own
            continue
    return ""
