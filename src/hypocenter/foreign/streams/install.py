"""Has torch tell a StreamWatch of what it asks of a GPU.

Events and waits are told by torch's own trace of its calls of the runtime (`torch.cuda._gpu_trace`,
which has those of autograd and of torch's libraries as well). What that leaves out is watched here:
questions whether something has ended, and graphs.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

from hypocenter.foreign.streams.watch import StreamWatch

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING of the driver's interface

Attempt = Callable[..., None]


class TorchAnswers:
    """torch's answers to a StreamWatch; see `watch.Gpu`."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.device_now = torch._C._cuda_getDevice
        self.stream_now = torch._C._cuda_getCurrentRawStream
        self.place_of = torch.Tensor.get_device

    def is_pinned(self, tensor: Any) -> bool:
        return bool(tensor.is_pinned())

    def number_of(self, stream: Any) -> int:
        if hasattr(stream, "cuda_stream"):
            return int(stream.cuda_stream)
        made = self._torch.cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
        return int(made.cuda_stream)

    def number_of_device(self, device: Any) -> int:
        """That of a torch.device, -1 for the host's."""
        if device is None or device.type != "cuda":
            return -1
        return int(self.device_now() if device.index is None else device.index)

    def ran(self, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        """torch knows by itself where its results lie."""

    def is_blocking(self, stream: int) -> bool:
        """Of a stream that torch did not make; its own are non-blocking."""
        flags = ctypes.c_uint(_NON_BLOCKING)
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            status = driver.cuStreamGetFlags(ctypes.c_void_p(stream), ctypes.byref(flags))
        except (OSError, AttributeError):  # not NVIDIA's
            return False
        return status == 0 and not flags.value & _NON_BLOCKING


def can_watch(torch: Any) -> bool:
    """Whether torch is for a GPU and tells of its calls."""
    return (
        torch.backends.cuda.is_built()
        and hasattr(torch._C, "_activate_gpu_trace")
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
    )


def install(torch: Any, watch: StreamWatch, attempt: Attempt) -> None:
    """From now on `watch` is told; `attempt` calls what may fail. Operations are told elsewhere."""
    from torch.cuda import _gpu_trace as trace  # torch is loaded, but this part of it may not be

    torch._C._activate_gpu_trace()

    def telling(tell: Callable[..., None]) -> Callable[..., None]:
        return functools.partial(attempt, tell)

    trace.register_callback_for_event_record(telling(watch.note_record))
    trace.register_callback_for_event_wait(telling(watch.note_wait))
    trace.register_callback_for_event_synchronization(telling(watch.host_waited_for_event))
    trace.register_callback_for_stream_synchronization(telling(watch.host_waited_for_stream))
    trace.register_callback_for_device_synchronization(telling(watch.host_waited))
    trace.register_callback_for_stream_creation(lambda stream: _end_own_work(torch, watch))
    watch_questions(torch, watch, attempt)
    watch_graphs(torch, watch, attempt)


def _end_own_work(torch: Any, watch: StreamWatch) -> None:
    """What the doctor has filled with UNDEFINED until now must not meet a new stream's work."""
    watch.has_streams = True
    if not watch.is_capturing:
        with watch.quiet():
            torch._C._cuda_synchronize()


def watch_questions(torch: Any, watch: StreamWatch, attempt: Attempt) -> None:
    """`query()` that says yes is as good as a wait."""
    for kind, number, tell in (
        (torch.cuda.Event, "cuda_event", watch.host_waited_for_event),
        (torch.cuda.Stream, "cuda_stream", watch.host_waited_for_stream),
    ):
        kind.query = _asking(kind.query, number, tell, attempt)


def _asking(
    original: Callable[[Any], bool], number: str, tell: Callable[[int], None], attempt: Attempt
) -> Callable[[Any], bool]:
    @functools.wraps(original)
    def query(asked: Any) -> bool:
        has_ended = original(asked)
        if has_ended:
            attempt(tell, getattr(asked, number))
        return has_ended

    return query


def watch_graphs(torch: Any, watch: StreamWatch, attempt: Attempt) -> None:
    """Captures, of which nothing runs, and replays, in which all of it does."""
    kind = getattr(torch.cuda, "CUDAGraph", None)
    if kind is None:
        return
    begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

    @functools.wraps(begin)
    def capture_begin(graph: Any, *args: Any, **options: Any) -> Any:
        result = begin(graph, *args, **options)
        attempt(watch.capture_begins, graph)
        return result

    @functools.wraps(end)
    def capture_end(graph: Any, *args: Any, **options: Any) -> Any:
        try:
            return end(graph, *args, **options)
        finally:
            attempt(watch.capture_ends)

    @functools.wraps(replay)
    def replay_graph(graph: Any, *args: Any, **options: Any) -> Any:
        attempt(watch.note_replay, graph, sys._getframe(1))
        return replay(graph, *args, **options)

    kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, replay_graph
