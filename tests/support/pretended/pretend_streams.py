"""Streams without a GPU: torch's own operations run on the CPU, and a StreamWatch is told of them.

Tensors are of the GPU where `on_gpu` was given them, or where an operation made them of such.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN204
from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hypocenter.foreign.ops.native import NativeOps
from hypocenter.foreign.streams.native_watch import NativeStreamWatch
from hypocenter.foreign.streams.operations import tensors_in
from hypocenter.foreign.streams.telling import disorders
from hypocenter.foreign.streams.watch import StreamWatch
from hypocenter.record.order_events import Disordered


class Stream:
    """As torch's, for a watch."""

    _numbers = itertools.count(0x10)

    def __init__(self, gpu: PretendGpu, number: int | None = None) -> None:
        self._gpu = gpu
        self.cuda_stream = next(self._numbers) if number is None else number

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> int:
        event = next(self._gpu.events)
        self._gpu.watch.note_record(event, self.cuda_stream)
        return event

    def wait_event(self, event: int) -> None:
        self._gpu.watch.note_wait(event, self.cuda_stream)

    def synchronize(self) -> None:
        self._gpu.watch.host_waited_for_stream(self.cuda_stream)


class PretendGpu(TorchDispatchMode):
    """One GPU; `found` is what the watch has told so far. To be entered like any mode."""

    def __init__(self, native: NativeOps | None = None) -> None:
        super().__init__()
        self._native = native
        self.events = itertools.count(1)
        self._told: list[dict[str, Any]] = []
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.default = Stream(self, 0)
        self._now = self.default
        self.watch: StreamWatch = (
            StreamWatch(self, self._told.append)
            if native is None
            else NativeStreamWatch(self, self._told.append, native, is_pretended=True)
        )

    def __enter__(self) -> Any:
        if self._native is None:
            return super().__enter__()
        self._native.see()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._native is None:
            super().__exit__(*error)
        else:
            self._native.code.see(False)

    def mark(self, tensor: torch.Tensor) -> None:
        """A tensor is of the GPU."""
        self._storages.add(tensor.untyped_storage())
        if self._native is not None:
            self._native.code.order.mark(tensor)

    @property
    def found(self) -> list[Disordered]:
        return list(disorders(self._told))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self._now
        self._choose(stream)
        try:
            yield
        finally:
            self._choose(before)

    def _choose(self, stream: Stream) -> None:
        self._now = stream
        if self._native is not None:
            self._native.code.order.set_pretended_stream(stream.cuda_stream)

    def on_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make one of the GPU, in the stream of now."""
        self.mark(tensor)
        if self._native is not None:
            return tensor.clone()
        with self:
            return tensor.clone()

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.add(tensor.untyped_storage())
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.watch.operation(func, args, kwargs or {})

    # -- what a StreamWatch asks --------------------------------------------------------------

    def place_of(self, tensor: torch.Tensor) -> int:
        if self._native is not None:
            return int(self._native.code.order.place_of(tensor))
        return 0 if tensor.untyped_storage() in self._storages else -1

    def device_now(self) -> int:
        return 0

    def stream_now(self, device: int) -> int:
        return self._now.cuda_stream

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._pinned

    def number_of(self, stream: Stream) -> int:
        return stream.cuda_stream

    def is_blocking(self, stream: int) -> bool:
        assert not self.watch.is_capturing, "the driver gives up a capture in which it is asked"
        return False

    def number_of_device(self, device: Any) -> int:
        return -1

    def ran(self, args, keywords, result) -> None:
        given = [tensor for one in (*args, *keywords.values()) for tensor in tensors_in(one)]
        if any(self.place_of(tensor) == 0 for tensor in given):
            old = {tensor.untyped_storage().data_ptr() for tensor in given}
            for made in tensors_in(result):
                if made.untyped_storage().data_ptr() not in old:
                    self._storages.add(made.untyped_storage())
