"""A torch whose GPU is host memory: allocation, copies, launches, graphs, and faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

ALIGNMENT_BYTES = 512


class RuntimeReport(RuntimeError):
    """What torch raises for an error of the runtime: a sentence, and since 2.8 its number."""

    def __init__(self, sentence: str, code: int | None = None) -> None:
        super().__init__(f"CUDA error: {sentence}\nFor debugging consider passing ...")
        if code is not None:
            self.error_code = code


class FakeTorch:
    """Everything but the GPU is torch's own."""

    def __init__(self, *, vendor: str = "cuda", num_gpus: int = 1, room: int = 1 << 30) -> None:
        self.version = SimpleNamespace(
            hip="7.0" if vendor == "hip" else None, cuda="13.0" if vendor == "cuda" else None
        )
        self.cuda = FakeCuda(num_gpus, room)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(
        self, size: int, *, dtype: Any, device: Any = None, pin_memory: bool = False
    ) -> torch.Tensor:
        self.cuda.report("empty")
        if device is None:
            self.cuda.num_pinned_bytes += size * pin_memory
            return torch.empty(size, dtype=dtype)
        if size > self.cuda.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
        # As the caching allocator aligns it, and with what was there before.
        wide = torch.full((size + ALIGNMENT_BYTES,), 0xAA, dtype=dtype)
        start = -wide.data_ptr() % ALIGNMENT_BYTES
        return wide[start : start + size]


class FakeCuda:
    """`torch.cuda`. `faults` maps a call to what it raises, once; `calls` is what was asked."""

    def __init__(self, num_gpus: int, room: int) -> None:
        self.num_gpus, self.room = num_gpus, room
        self.calls: list[Any] = []
        self.num_pinned_bytes = 0
        self.faults: dict[str, Exception] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.CUDAGraph = FakeGraph

    def report(self, call: str) -> None:
        self.calls.append(call)
        if fault := self.faults.pop(call, None):
            raise fault

    def is_available(self) -> bool:
        return self.num_gpus > 0

    def device_count(self) -> int:
        return self.num_gpus

    def set_device(self, index: int) -> None:
        self.calls.append(("set_device", index))

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: Any) -> None:
        """There is but one."""

    def memory_reserved(self, device: Any) -> int:
        return 0

    def empty_cache(self) -> None:
        self.report("empty_cache")

    def memory_allocated(self, device: Any) -> int:
        return 0

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.room, 1 << 30

    def synchronize(self, device: Any) -> None:
        assert self.recording is None, "a real GPU refuses to wait during a capture"
        self.report("synchronize")

    @contextmanager
    def graph(self, graph: FakeGraph, *, capture_error_mode: str) -> Iterator[None]:
        self.recording = graph.launches
        try:
            yield
        finally:
            self.recording = None
            self.report("capture_end")


class FakeEvent:
    """`torch.cuda.Event`: nothing is ever behind it."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self._is_recorded = cuda, False

    def record(self, stream: None) -> None:
        self._is_recorded = True

    def synchronize(self) -> None:
        assert self._is_recorded, "it waits for nothing"
        self._cuda.report("event_synchronize")


class FakeGraph:
    """`torch.cuda.CUDAGraph`: the launches that were recorded, in order."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


class FakeJit:
    """A Triton kernel as far as a launch sees it: `body` is what it does to its arguments."""

    def __init__(self, cuda: FakeCuda, body: Callable[..., None], name: str = "add_kernel") -> None:
        self.cuda, self.body, self.__name__ = cuda, body, name
        self.pre_run_hooks: list[Callable[..., None]] = []
        self.runs: list[dict[str, Any]] = []

    def add_pre_run_hook(self, hook: Callable[..., None]) -> None:
        self.pre_run_hooks.append(hook)

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **keywords: Any) -> Any:
        for hook in self.pre_run_hooks:
            hook(*args, **keywords)
        self.runs.append({"args": args, "grid": grid, "warmup": warmup, **keywords})
        if not warmup:
            self.cuda.report("launch")
            if self.cuda.recording is None:
                self.body(*args)
            else:
                self.cuda.recording.append(partial(self.body, *args))
        return SimpleNamespace(metadata=SimpleNamespace(num_warps=8, shared=4096))
