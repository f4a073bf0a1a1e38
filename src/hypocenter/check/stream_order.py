"""Streams of a checked file: there is no GPU, but what they order and what they do not is known.

Puts streams, events and graphs in the place of torch's that only count the order, and tells a
StreamWatch of what the file's operations, copies and launches use. Which tensors are a GPU's is
known by how they were made: all of them lie on the CPU here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from hypocenter.check.pretend_gpu import Nothing
from hypocenter.foreign.streams.operations import tensors_in
from hypocenter.foreign.streams.telling import disorders
from hypocenter.foreign.streams.watch import StreamWatch
from hypocenter.order.extents import Extent, bytes_at
from hypocenter.order.text import call_of, sentence_of
from hypocenter.record.order_events import Disorder
from hypocenter.replay.arguments import Argument
from hypocenter.replay.findings import Finding, FindingKind, Site
from hypocenter.replay.touched import touched_bytes

_KINDS = {
    Disorder.WAIT: FindingKind.MISSING_WAIT,
    Disorder.HOST_READ: FindingKind.READ_IN_FLIGHT,
    Disorder.HOST_WRITE: FindingKind.REWRITTEN_IN_FLIGHT,
    Disorder.REUSED: FindingKind.REUSED_IN_FLIGHT,
}
#: Parts of a tensor that a launch has touched which are told of; with more, nothing is.
_MAX_PARTS = 64
_tensor: Any = torch.Tensor
_MOVES = {_tensor.to, _tensor.cuda, _tensor.cpu}
_UNWRITTEN = {torch.empty, torch.empty_strided}


class StreamOrder:
    """`functions` and `operations` are modes to run the file in; each pair is reported once.

    `is_registered` says of an address whether the file has registered that memory of the host.
    """

    def __init__(
        self, report: Callable[[Finding], None], is_registered: Callable[[int], bool]
    ) -> None:
        self._report, self._is_registered = report, is_registered
        self._of_gpu: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pinned: weakref.WeakSet[Any] = weakref.WeakSet()
        self.numbers = itertools.count(1)
        self.watch = StreamWatch(self, self._tell)
        self.now: Any = None
        self.functions, self.operations = _Functions(self), _Operations(self.watch)

    def install(self) -> None:
        """Give the file streams; to be called when it has been given a GPU."""
        order, anything = self, torch.cuda

        class Stream(_Stream):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(order)

        class Event(_Event):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(order)

        class StreamContext(_StreamContext):
            def __init__(self, stream: Any) -> None:
                super().__init__(order, stream)

        class Graph(_Graph):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(order)

        class Capture(_Capture):
            def __init__(
                self, cuda_graph: Any, pool: Any = None, stream: Any = None, **_: Any
            ) -> None:
                super().__init__(order, cuda_graph, stream or Stream())

        class OwnCapture(_OwnCapture):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(order)

        default = Stream()
        default.cuda_stream = 0
        self.now = default
        replaced: dict[str, Any] = {
            "Stream": Stream,
            "Event": Event,
            "StreamContext": StreamContext,
            "stream": StreamContext,
            "CUDAGraph": Graph,
            "graph": Capture,
            "current_stream": lambda *args, **kwargs: order.now,
            "default_stream": lambda *args, **kwargs: default,
            "set_stream": order.set_stream,
            "synchronize": lambda *args, **kwargs: order.watch.host_waited(),
            "is_current_stream_capturing": lambda: order.watch.is_capturing,
        }
        for name, value in replaced.items():
            setattr(anything, name, value)
        # The same by the names that torch has for a GPU of any maker.
        for where, name, value in (
            (torch, "Stream", Stream),
            (torch, "Event", Event),
            (torch.accelerator, "Graph", OwnCapture),
        ):
            setattr(where, name, value)
        _watch_default_device(self)
        # torch itself takes no stream of another's making, and asks no mode before it says so.
        _tensor.record_stream = lambda tensor, stream: order.watch.kept_for(tensor, stream)

    def make_on_gpu(self, func: Any, make: Callable[[], Any]) -> Any:
        """What `func` gives, by `make`, is new memory of a GPU."""
        with self.watch.quiet():
            result = make()
        for tensor in tensors_in(result):
            if self.place_of(tensor) != 0:
                self.mark(tensor)
                name = getattr(func, "__name__", "an operation")
                self.watch.note_made(tensor, f"torch.{name}", is_written=func not in _UNWRITTEN)
        return result

    def set_stream(self, stream: Any) -> None:
        """From now on work goes to that one."""
        self.now = stream if stream is not None else self.now

    def note_launch(
        self,
        kernel: str,
        site: Site | None,
        given: Mapping[str, Any],
        arguments: tuple[Argument, ...],
    ) -> None:
        """A launch was replayed: `given` are its tensors, `arguments` what became of each."""
        uses: list[tuple[Any, Extent, bool, str]] = []
        for argument in arguments:
            tensor = given.get(argument.name)
            if not isinstance(tensor, torch.Tensor) or argument.real_address is not None:
                continue
            if not (self.is_pinned(tensor) or self._is_registered(tensor.data_ptr())):
                self.mark(tensor)  # Triton refuses other memory of the host
            for is_write in (False, True):
                spans = touched_bytes(argument, writes=is_write, reads=not is_write)
                if len(spans) <= _MAX_PARTS:
                    uses += (
                        (
                            tensor,
                            bytes_at(tensor.data_ptr() + int(start), int(end - start)),
                            is_write,
                            argument.name,
                        )
                        for start, end in spans
                    )
        self.watch.ran_kernel(kernel, uses, f"{site.file}:{site.line}" if site else "")

    def _tell(self, fields: dict[str, Any]) -> None:
        [one] = disorders([fields])
        file, _, line = one.second.site.rpartition(":")
        self._report(
            Finding(
                kind=_KINDS[one.kind],
                kernel=one.second.what,
                operation="order",
                detail=f"{sentence_of(one)}; missing: {call_of(one)}",
                argument=one.tensor or None,
                launched_at=Site(file, int(line), "", "") if line.isdigit() else None,
            )
        )

    # -- what a StreamWatch asks -----------------------------------------------------------------

    def mark(self, tensor: torch.Tensor) -> None:
        """A tensor is a GPU's."""
        self._of_gpu.add(tensor.untyped_storage())

    def pin(self, tensor: torch.Tensor) -> None:
        """A tensor of the host is pinned."""
        self._pinned.add(tensor.untyped_storage())

    def place_of(self, tensor: torch.Tensor) -> int:
        return 0 if tensor.untyped_storage() in self._of_gpu else -1

    def device_now(self) -> int:
        return 0

    def stream_now(self, device: int) -> int:
        return int(self.now.cuda_stream)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage() in self._pinned

    def number_of(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def is_blocking(self, stream: int) -> bool:
        return False

    def number_of_device(self, device: Any) -> int:
        return -1  # copies between the two are told by `_Functions`

    def ran(self, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        """What comes of a GPU's tensors is a GPU's."""
        given = [tensor for value in (*args, *keywords.values()) for tensor in tensors_in(value)]
        if any(self.place_of(tensor) == 0 for tensor in given):
            old = {tensor.untyped_storage().data_ptr() for tensor in given}
            for made in tensors_in(result):  # what was copied into stays where it is
                if made.untyped_storage().data_ptr() not in old:
                    self.mark(made)


class _Operations(TorchDispatchMode):
    def __init__(self, watch: StreamWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch = watch

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._watch.operation(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Sees which tensors are made for a GPU, moved to one or from it, and kept for a stream."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        order = self._order
        if func in _MOVES and (place := _place_of_move(order, func, args, kwargs)) is not None:
            return self._move(func, args, kwargs, is_to_gpu=place == 0)
        is_for_gpu = func not in _MOVES and _is_gpu(kwargs.get("device"))
        if not is_for_gpu:
            result = func(*args, **kwargs)
            is_pinned = func is _tensor.pin_memory or kwargs.get("pin_memory")
            if is_pinned and isinstance(result, torch.Tensor):
                order.pin(result)
            return result
        return order.make_on_gpu(func, lambda: func(*args, **kwargs))

    def _move(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_to_gpu: bool
    ) -> Any:
        order, source = self._order, args[0]
        with order.watch.quiet():
            result = func(*args, **kwargs)
        if result is source or not isinstance(result, torch.Tensor):
            return result
        is_asked = bool(kwargs.get("non_blocking"))
        was_on_gpu = order.place_of(source) == 0
        if is_to_gpu:
            order.mark(result)
        elif is_asked and was_on_gpu:
            order.pin(result)  # torch gives such a copy pinned memory
        if is_to_gpu and was_on_gpu:  # torch would give the tensor itself
            order.watch.note_made(result, f"torch.{func.__name__}", is_written=False)
        elif is_to_gpu != was_on_gpu:
            order.watch.note_copy(source, result, f"torch.{func.__name__}", is_asked=is_asked)
        return result


def _place_of_move(
    order: StreamOrder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """0 for a GPU, -1 for the host; None for a move to another type alone."""
    if func is _tensor.cuda:
        return 0
    if func is _tensor.cpu:
        return -1
    asked = kwargs.get("device", args[1] if len(args) > 1 else kwargs.get("other"))
    if isinstance(asked, torch.Tensor):
        return order.place_of(asked)
    if isinstance(asked, torch.device | str) or type(asked) is int:
        return 0 if _is_gpu(asked) else -1
    return None


def _watch_default_device(order: StreamOrder) -> None:
    """What is made within `with torch.device("cuda")`, or after set_default_device, is a GPU's."""
    context: Any = _device.DeviceContext
    begin, plain, makers = context.__init__, context.__torch_function__, _makers()

    def __init__(self: Any, device: Any) -> None:
        begin(self, device)
        self.is_of_gpu = _is_gpu(device)

    def __torch_function__(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_asked = func in makers and (kwargs or {}).get("device") is None
        if not (is_asked and self.is_of_gpu):
            return plain(self, func, types, args, kwargs)
        return order.make_on_gpu(func, lambda: plain(self, func, types, args, kwargs))

    context.__init__, context.__torch_function__ = __init__, __torch_function__


def _makers() -> frozenset[Any]:
    """Functions that make a tensor where the default device is."""
    anything: Any = _device
    return frozenset(anything._device_constructors())


def _is_gpu(device: Any) -> bool:
    if type(device) is int:
        return True
    name = device.type if isinstance(device, torch.device) else device
    return isinstance(name, str) and name.split(":")[0] == "cuda"


# -- what stands in the place of torch's ---------------------------------------------------------


class _Stream(Nothing):
    """A stream that does nothing; its number is that of a stream of a GPU's."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order
        self.cuda_stream = 0x1000 + next(order.numbers)
        self._before: list[Any] = []

    def __enter__(self) -> Any:
        self._before.append(self._order.now)
        self._order.set_stream(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._order.set_stream(self._before.pop())

    @property
    def stream_id(self) -> int:
        return self.cuda_stream

    def is_capturing(self) -> bool:
        return self._order.watch.is_capturing

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        made = event if event is not None else _Event(self._order)
        made.record(self)
        return made

    def synchronize(self) -> None:
        self._order.watch.host_waited_for_stream(self.cuda_stream)

    def query(self) -> bool:
        self.synchronize()
        return True


class _Event(Nothing):
    def __init__(self, order: StreamOrder) -> None:
        self._order, self._number = order, next(order.numbers)

    def record(self, stream: Any = None) -> None:
        self._order.watch.note_record(self._number, (stream or self._order.now).cuda_stream)

    def wait(self, stream: Any = None) -> None:
        self._order.watch.note_wait(self._number, (stream or self._order.now).cuda_stream)

    def synchronize(self) -> None:
        self._order.watch.host_waited_for_event(self._number)

    def query(self) -> bool:
        self.synchronize()
        return True


class _StreamContext(Nothing):
    def __init__(self, order: StreamOrder, stream: Any) -> None:
        self._order, self._stream, self._before = order, stream, order.now

    def __enter__(self) -> Any:
        self._before = self._order.now
        self._order.set_stream(self._stream)
        return self

    def __exit__(self, *error: object) -> None:
        self._order.set_stream(self._before)


class _Graph(Nothing):
    """A captured launch runs, and is checked, once; a replay only uses what it used."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self._order.watch.capture_begins(self)

    def capture_end(self) -> None:
        self._order.watch.capture_ends()

    def replay(self) -> None:
        self._order.watch.note_replay(self, None)


class _OwnCapture(_Graph):
    """A graph that captures what is asked for within it."""

    def __enter__(self) -> Any:
        self.capture_begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.capture_end()


class _Capture(_StreamContext):
    def __init__(self, order: StreamOrder, graph: Any, stream: Any) -> None:
        super().__init__(order, stream)
        self._graph = graph

    def __enter__(self) -> Any:
        torch.cuda.synchronize()
        super().__enter__()
        self._graph.capture_begin()
        return self

    def __exit__(self, *error: object) -> None:
        self._graph.capture_end()
        super().__exit__(*error)
