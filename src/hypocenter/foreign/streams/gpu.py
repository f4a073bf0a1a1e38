"""What a StreamWatch asks of torch: where tensors lie, in which stream work goes, what is pinned.

`install.py` answers for a real torch, `hypo check` for one that has no GPU. Asks nothing itself.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

#: The place of the host's memory.
OF_HOST = -1


class Gpu(Protocol):
    """What is asked of torch: `place_of` gives the number of a tensor's GPU, -1 for the host's."""

    def place_of(self, tensor: Any) -> int: ...
    def device_now(self) -> int: ...
    def stream_now(self, device: int) -> int: ...
    def is_pinned(self, tensor: Any) -> bool: ...
    def number_of(self, stream: Any) -> int: ...
    def is_blocking(self, stream: int) -> bool: ...
    def number_of_device(self, device: Any) -> int: ...
    def ran(self, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None: ...


@functools.cache
def is_plain(kind: type) -> bool:
    """Whether tensors of a type are what they seem: no others stand behind them."""
    return not any(
        "__torch_dispatch__" in vars(base) and base.__module__ != "torch" for base in kind.__mro__
    )
