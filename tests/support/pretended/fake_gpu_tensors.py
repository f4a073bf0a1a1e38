"""Tensors of a GPU that is made of words, and launches with them, as a foreign recorder asks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from hypocenter.foreign.recorder import ForeignRecorder, LaunchPlace
from hypocenter.record import ring


class Storage:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.address, self.num_bytes = address, num_bytes

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.num_bytes


class FakeTensor:
    """A tensor of a GPU that is not there, as the recorder asks for it."""

    def __init__(
        self, storage: Storage, shape: tuple[int, ...], dtype: Any = torch.float32, offset: int = 0,
        device: str = "cuda:0",
    ) -> None:  # fmt: skip
        self._storage, self.shape, self.dtype, self._offset = storage, shape, dtype, offset
        self.device = torch.device(device)

    def untyped_storage(self) -> Storage:
        return self._storage

    def storage_offset(self) -> int:
        return self._offset

    def element_size(self) -> int:
        return int(self.dtype.itemsize)

    def data_ptr(self) -> int:
        return self._storage.address + self._offset * self.element_size()

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(torch.empty(self.shape, device="meta").stride())

    def is_pinned(self) -> bool:
        return False


constexpr = int  # what an annotation says is all that counts


def kernel(x_ptr: Any, out_ptr: Any, n: int, BLOCK: constexpr) -> None:
    """Stands for a Triton kernel."""


JIT = SimpleNamespace(fn=kernel)


class Launching:
    """`kernel[grid](...)` as a program writes it, straight to a recorder."""

    def __init__(self, recorder: ForeignRecorder) -> None:
        self._recorder = recorder
        #: What the launches are captured into, if anything, and whether that compiles their kernel.
        self.graph: Any = None
        self.is_compiled = False

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            frame = sys._getframe(1)
            self._recorder.record_launch(
                JIT, args, {"BLOCK": 64, **options}, grid,
                LaunchPlace("cuda:0", site="script.py:9", caller=frame),
                self.graph, is_compiled=self.is_compiled,
            )  # fmt: skip

        return launch


def events(recorder: ForeignRecorder, kind: Any) -> list[Any]:
    run = ring.read_run(recorder.folder)
    assert run.missing == ()
    return [event for event in run.events if isinstance(event, kind)]
