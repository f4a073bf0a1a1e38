"""What a StreamWatch asks of torch: where tensors lie, in which stream work goes, what is pinned.

`install.py` answers for a real torch, `hypo check` for one that has no GPU. Asks nothing itself.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

#: The place of the host's memory.
OF_HOST = -1


class Gpu(Protocol):
    """What is asked of torch; streams are known by the numbers that the runtime gives them."""

    def place_of(self, tensor: Any) -> int:
        """The number of a tensor's GPU, OF_HOST for the host's."""

    def device_now(self) -> int:
        """The GPU that this thread has chosen."""

    def stream_now(self, device: int) -> int:
        """The stream that this thread's work goes to on a GPU, 0 for the default one."""

    def is_pinned(self, tensor: Any) -> bool:
        """Whether memory of the host is such as a GPU reads and writes by itself."""

    def number_of(self, stream: Any) -> int:
        """That of one of torch's streams."""

    def is_blocking(self, stream: int) -> bool:
        """Whether a stream and the default one wait for each other."""

    def number_of_device(self, device: Any) -> int:
        """That of one of torch's devices, OF_HOST for the host."""

    def ran(self, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        """One of torch's operations has given that."""


@functools.cache
def is_plain(kind: type) -> bool:
    """Whether tensors of a type are what they seem: no others stand behind them."""
    return not any(
        "__torch_dispatch__" in vars(base) and base.__module__ != "torch" for base in kind.__mro__
    )
