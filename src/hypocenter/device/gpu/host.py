"""Streams and events of a GPU, and host memory that its kernels may write to; through torch."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hypocenter.device.backend import Bytes

# Flags of cudaHostRegister and hipHostRegister: for every context, and mapped into the device.
_PORTABLE_AND_MAPPED = 3


class TorchStreams:
    """Named streams of one device, and events in them."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device = torch, device
        self._streams: dict[str, Any] = {}

    @contextlib.contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """Launches and copies in the block go to the stream `name`, which waits for no other."""
        if name not in self._streams:
            self._streams[name] = self._torch.cuda.Stream(self._device)
        with self._torch.cuda.stream(self._streams[name]):
            yield

    def record(self) -> Any:
        """An event at the end of the current stream."""
        event = self._torch.cuda.Event()
        event.record(self._torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Any) -> None:
        """What follows in the current stream runs after `event`."""
        self._torch.cuda.current_stream(self._device).wait_event(event)

    def begin_copy(self, source: Any, is_pinned: bool) -> Callable[[], Bytes]:
        """Begin to copy a device's bytes; waits for the copy when called, or now if not pinned."""
        host = self._torch.empty(len(source), dtype=self._torch.uint8, pin_memory=is_pinned)
        host.copy_(source, non_blocking=is_pinned)
        event = self.record()

        def wait_for_copy() -> Bytes:
            event.synchronize()
            values: Bytes = host.numpy()
            return values

        return wait_for_copy

    def allocate_pinned(self, num_bytes: int) -> Any:
        """Host bytes that the device reads by itself, as a numpy array."""
        return self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=True).numpy()


def host_tensor(torch: Any, flat: Bytes) -> Any:
    """A torch tensor over host bytes without a copy; torch warns of memory that it may not write,
    such as that of a mapped file, and so is not told whose it is."""
    memory = (ctypes.c_uint8 * len(flat)).from_address(flat.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(memory))


def map_host(torch: Any, memory: memoryview) -> Any:
    """Let kernels write to host memory, which begins at a page: a tensor over it, or None.

    With unified addresses, which every GPU of ours has, the device sees it where the host does.
    """
    data = np.frombuffer(memory, np.uint8)
    try:
        runtime = torch.cuda.cudart()
        found = runtime.cudaHostRegister(data.ctypes.data, data.nbytes, _PORTABLE_AND_MAPPED)
    except (AttributeError, RuntimeError):
        return None
    if int(found) != 0:  # a file on a disk cannot be, for one
        _forget_error(torch)
        return None
    return host_tensor(torch, data)


def _forget_error(torch: Any) -> None:
    """The runtime keeps the last error until it is asked for, and torch asks after each kernel of
    its own: the next one would be blamed."""
    with contextlib.suppress(RuntimeError):
        torch.empty(1, dtype=torch.uint8, device=torch.device("cuda")).zero_()
