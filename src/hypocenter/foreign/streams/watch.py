"""What a program's threads ask of a GPU, in order, and whose memory that uses.

Called by `install.py` for each of torch's operations, events and waits, and by `hooks.py` for each
Triton launch. `Gpu` is what it asks of torch, which tests answer without one.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from hypocenter.foreign.caller import caller_of_now
from hypocenter.foreign.streams.gpu import OF_HOST, Gpu, is_plain
from hypocenter.foreign.streams.kernel_uses import uses_of
from hypocenter.foreign.streams.operations import Operation, Sort, operation_of, tensors_in
from hypocenter.foreign.streams.storages import KnownStorage, KnownStorages
from hypocenter.foreign.streams.telling import BACKWARD, Telling
from hypocenter.order.clocks import HOST
from hypocenter.order.extents import Extent
from hypocenter.order.ledger import Instant, Ledger, Use
from hypocenter.record.order_events import OrderStep

#: After so many failures nothing is watched any more.
MAX_FAILED = 10
#: Uses that are kept of a graph.
MAX_OF_GRAPH = 4096
#: That of `non_blocking` among the arguments of copy_.
_PLACE_IN_COPY = 2

Tell = Callable[[dict[str, Any]], None]


class Work(NamedTuple):
    """What uses memory: an operation's or a kernel's name, the program's line, and the frame."""

    what: str
    site: str
    frame: FrameType | None


@dataclass(slots=True, eq=False)
class _Graph:
    ledger: Ledger = field(default_factory=Ledger)
    uses: dict[Any, tuple[int, Use]] = field(default_factory=dict)


class StreamWatch:
    """The order of one process. `tell` gets the fields of each Disordered, once per two places."""

    def __init__(self, gpu: Gpu, tell: Tell) -> None:
        self._gpu = gpu
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._operations: dict[Any, Operation] = {}
        self._storages, self._telling = KnownStorages(), Telling(tell)
        self._graphs: weakref.WeakKeyDictionary[Any, _Graph] = weakref.WeakKeyDictionary()
        self._graph: _Graph | None = None
        #: What torch does now is the doctor's business, and none of the program's.
        self._num_quiet = 0
        #: The program has made a stream.
        self.has_streams = False
        self.problem, self._num_failed, self.num_async = "", 0, 0
        self.num_operations = self.num_launches = self.num_waits = 0
        self.streams: dict[str, None] = {}

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is noted now, or not any more."""
        return self._num_quiet > 0 or self._num_failed >= MAX_FAILED

    @property
    def num_dropped(self) -> int:
        """Pairs without order that were too many to be told of."""
        return self._telling.num_dropped

    @property
    def is_capturing(self) -> bool:
        """Whether what is asked for is captured into a graph."""
        return self._graph is not None

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """What torch does within is not the program's."""
        self._num_quiet += 1
        try:
            yield
        finally:
            self._num_quiet -= 1

    # -- torch's operations -----------------------------------------------------------------------

    def operation(self, overload: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run one of torch's operations, and note what it uses."""
        known = self._operations.get(overload)
        if known is None:
            known = self._operations[overload] = operation_of(overload)
        if known.sort is Sort.NOTHING or self.is_quiet:
            return overload(*args, **keywords)
        begun = self._attempt(self._before, known, args, keywords)
        result = overload(*args, **keywords)
        self._gpu.ran(args, keywords, result)
        if begun is not None:
            self._attempt(self._end, known, *begun, args, keywords, result)
        return result

    def _attempt(self, do: Callable[..., Any], *args: Any) -> Any:
        """Do it, or keep why it cannot be done; after some failures nothing is watched any more."""
        try:
            with self._lock:
                return do(*args)
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}"
            self._num_failed += 1
            return None

    def _before(
        self, known: Operation, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[list[tuple[Any, str, bool, int]], Instant | None] | None:
        """None for an operation on tensors whose memory torch does not tell of."""
        found = self._tensors_of(known, args, keywords)
        if found is None:
            return None
        given, device = found
        return given, self._begin(device) if device != OF_HOST else None

    def _tensors_of(
        self, known: Operation, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[list[tuple[Any, str, bool, int]], int] | None:
        """The tensors that are used, with their places; the GPU that does it, -1 for the host."""
        given, device, place_of = [], OF_HOST, self._gpu.place_of
        for tensor, name, is_write in known.tensors_of(args, keywords):
            if not is_plain(tensor.__class__):
                return None
            place = place_of(tensor)
            given.append((tensor, name, is_write, place))
            # A copy between two GPUs is made by that of its source.
            if place != OF_HOST and (device == OF_HOST or known.sort is Sort.COPY):
                device = place
        if known.sort is Sort.COPY and device == OF_HOST and "device" in keywords:
            device = self._gpu.number_of_device(keywords["device"])
        return given, device

    def _begin(self, device: int) -> Instant:
        """Work is asked for on a GPU, in the stream that this thread has now."""
        self._drain()
        return self._now.begin(self._stream(self._gpu.stream_now(device), device))

    def _end(
        self,
        known: Operation,
        given: list[tuple[Any, str, bool, int]],
        moment: Instant | None,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        result: Any,
    ) -> None:
        if known.sort is Sort.RECORD_STREAM:
            self._keep_for(given[0][0], args[1] if len(args) > 1 else keywords["s"])
            return
        if moment is None:
            self._end_on_host(known, given, result)
            return
        self.num_operations += 1
        frame, site = caller_of_now()
        work = Work(known.name, site or BACKWARD, frame)
        if known.sort is Sort.NUMBER:
            self._take(OrderStep("host", moment.stream))
        is_copy_by_host = False
        if known.sort is Sort.COPY:
            is_copy_by_host = self._copy_of(given, moment, args, keywords, result, work)
        for tensor, name, is_write, place in given:
            if place == OF_HOST:
                if not is_copy_by_host:
                    self._use_of_host(tensor, is_write, work)
                continue
            self._use(tensor, moment, is_write, work, argument=name)
        self._results(known, moment, result, work)

    def _end_on_host(
        self, known: Operation, given: list[tuple[Any, str, bool, int]], result: Any
    ) -> None:
        """An operation of the host: of use where a stream copies from or to its memory."""
        if self._storages.of_host:
            work: Work | None = None
            for tensor, _, is_write, _ in given:
                if self._is_watched(tensor):
                    if work is None:
                        frame, site = caller_of_now()
                        work = Work(known.name, site, frame)
                    self._use_of_host(tensor, is_write, work)
        for tensor in tensors_in(result):  # made for a GPU of nothing that lies on one
            place = self._gpu.place_of(tensor)
            if place == OF_HOST:
                return
            moment = self._begin(place)
            self.num_operations += 1
            frame, site = caller_of_now()
            self._results(known, moment, tensor, Work(known.name, site or BACKWARD, frame))

    def _results(self, known: Operation, moment: Instant, result: Any, work: Work) -> None:
        for tensor in tensors_in(result):
            if self._gpu.place_of(tensor) == OF_HOST:
                continue
            storage = tensor.untyped_storage()
            if self._storages.find(storage) is not None:
                continue  # it was among the arguments
            self._new(storage, moment.stream, work.site)
            if known.makes:
                self._use(tensor, moment, True, work, argument="result")

    def _copy_of(
        self,
        given: list[tuple[Any, str, bool, int]],
        moment: Instant,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        result: Any,
        work: Work,
    ) -> bool:
        """A copy between host and GPU; False for another one."""
        source = [tensor for tensor, name, _, _ in given if name in ("src", "self")][-1]
        into = given[0][0] if len(given) > 1 else result
        is_out = self._gpu.place_of(into) == OF_HOST
        if is_out == (self._gpu.place_of(source) == OF_HOST):
            return False
        place = _PLACE_IN_COPY if len(given) > 1 else len(args)
        is_asked = args[place] if len(args) > place else keywords.get("non_blocking", False)
        self._copy(source, into, moment, work, is_out=is_out, is_asked=bool(is_asked))
        return True

    def _copy(
        self,
        source: Any,
        into: Any,
        moment: Instant,
        work: Work,
        *,
        is_out: bool,
        is_asked: bool,
    ) -> None:
        """What a copy does to the memory of the host; `is_asked`: it need not be waited for.

        Of pageable memory the host reads and writes itself before the copy comes back, and of such
        a copy to the host all has ended then (CUDA's rules of API synchronisation). Of pinned
        memory the GPU does, unless it is waited for.
        """
        there = into if is_out else source
        if is_asked and self._gpu.is_pinned(there):
            self.num_async += 1
            self._use(there, moment, is_out, work, argument="host memory")
            return
        self._use_of_host(there, is_out, work)
        if is_out or not is_asked:
            self._take(OrderStep("host", moment.stream))

    # -- memory -----------------------------------------------------------------------------------

    def _use(
        self,
        tensor: Any,
        moment: Instant,
        is_write: bool,
        work: Work,
        *,
        argument: str = "",
        launch: int = 0,
        region: Extent | None = None,
    ) -> None:
        known = self._memory(tensor)
        if moment.stream != known.stream:
            self._storages.share(known.number)
        region = region or Extent(
            tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size()
        )
        use = Use(
            moment, region, is_write, work.what, work.site, launch, argument, is_sure=not launch
        )
        if self._graph is not None:
            key = known.number, region, is_write
            if len(self._graph.uses) < MAX_OF_GRAPH:
                self._graph.uses.setdefault(key, (known.number, use))
        for found in self._now.use(known.number, use):
            self._telling.note(found, self._now, work.frame, in_graph=self.is_capturing)

    def _use_of_host(self, tensor: Any, is_write: bool, work: Work) -> None:
        if self._is_watched(tensor):
            self._drain()
            self._use(tensor, self._ledger.begin(HOST), is_write, work)

    def _is_watched(self, tensor: Any) -> bool:
        of_host = self._storages.of_host
        if not of_host or not hasattr(tensor, "untyped_storage"):
            return False
        known = self._storages.find(tensor.untyped_storage())
        return known is not None and known.number in of_host

    def _memory(self, tensor: Any) -> KnownStorage:
        storage = tensor.untyped_storage()
        known = self._storages.find(storage)
        if known is not None and not self._storages.has_moved(known, storage):
            return known
        found = self._new(storage, "", "")
        if self._gpu.place_of(tensor) == OF_HOST:
            self._storages.of_host.add(found.number)
        return found

    def _new(self, storage: Any, stream: str, site: str) -> KnownStorage:
        """A storage that was not seen before."""
        self._drain()
        known, is_new = self._storages.add(storage, stream)
        if is_new and stream:
            self._now.make(known.number, stream, known.extent, site)
        return known

    def _drain(self) -> None:
        """Tell of memory that went away before what is asked for now."""
        for number, site in self._storages.take_ended():
            self._now.free(number, lambda site=site: site)  # type: ignore[misc]

    def _keep_for(self, tensor: Any, stream: Any) -> None:
        place = self._gpu.place_of(tensor)
        name = self._stream(self._gpu.number_of(stream), place)
        self._drain()
        self._now.keep_for(self._memory(tensor).number, name)

    # -- what is told without an operation of torch's ---------------------------------------------

    def kept_for(self, tensor: Any, stream: Any) -> None:
        """record_stream was called."""
        with self._lock:
            self._keep_for(tensor, stream)

    def note_made(self, tensor: Any, what: str, *, is_written: bool) -> None:
        """New memory of a GPU, in the stream of now."""
        with self._lock:
            moment = self._begin(self._gpu.place_of(tensor))
            self.num_operations += 1
            frame, site = caller_of_now()
            self._new(tensor.untyped_storage(), moment.stream, site)
            if is_written:
                self._use(tensor, moment, True, Work(what, site, frame), argument="result")

    def note_copy(self, source: Any, into: Any, what: str, *, is_asked: bool) -> None:
        """A copy between host and GPU into new memory; `is_asked`: not to be waited for."""
        with self._lock:
            gpu = max(self._gpu.place_of(source), self._gpu.place_of(into))
            moment = self._begin(gpu)
            self.num_operations += 1
            frame, site = caller_of_now()
            work = Work(what, site, frame)
            is_out = self._gpu.place_of(into) == OF_HOST
            self._copy(source, into, moment, work, is_out=is_out, is_asked=is_asked)
            if is_out:
                self._use(source, moment, False, work, argument="self")
            else:
                self._new(into.untyped_storage(), moment.stream, site)
                self._use(into, moment, True, work, argument="result")

    def ran_kernel(self, kernel: str, uses: list[tuple[Any, Extent, bool, str]], site: str) -> None:
        """A launch has touched these parts: tensor, part, whether it wrote it, and parameter."""
        with self._lock:
            moment = self._begin(self._gpu.device_now())
            self.num_launches += 1
            frame, _ = caller_of_now()
            work = Work(kernel, site, frame)
            for tensor, region, is_write, parameter in uses:
                self._use(tensor, moment, is_write, work, argument=parameter, region=region)

    # -- launches ---------------------------------------------------------------------------------

    def launch(
        self, jit: Any, given: dict[str, Any], launch: int, site: str, frame: FrameType | None
    ) -> None:
        """A Triton launch is about to be made, by the event number `launch`."""
        if self.is_quiet:
            return
        with self._lock:
            uses = uses_of(jit)
            device = self._gpu.device_now()
            moment = self._begin(device)
            self.num_launches += 1
            work = Work(getattr(jit, "__name__", "a kernel"), site, frame)
            for parameter, (reads, writes) in uses.items():
                tensor = given.get(parameter)
                tensor = getattr(tensor, "base", tensor)
                if (reads or writes) and hasattr(tensor, "untyped_storage"):
                    self._use(
                        tensor,
                        moment,
                        writes,
                        work,
                        argument=parameter,
                        launch=launch or -1,
                    )

    # -- order ------------------------------------------------------------------------------------

    @property
    def _now(self) -> Ledger:
        return self._graph.ledger if self._graph is not None else self._ledger

    def _stream(self, number: int, device: int) -> str:
        name = f"{number:#x}" if number else (f"default of GPU {device}" if device else "default")
        # Asked while a graph is captured, the driver gives the capture up (measured on an H200).
        if name not in self.streams and self._graph is None:
            self.streams[name] = None
            if number and self._gpu.is_blocking(number):
                default = f"default of GPU {device}" if device else "default"
                self._ledger.step(OrderStep("blocking", name, other=default))
        return name

    def _take(self, step: OrderStep) -> None:
        self._drain()
        self.num_waits += step.action != "record"
        self._now.step(step)

    def _note(self, action: str, stream: int | None = None, event: int = 0) -> None:
        with self._lock:
            if not self.is_quiet:
                device = self._gpu.device_now()
                name = self._stream(stream, device) if stream is not None else ""
                self._take(OrderStep(action, name, event))

    def note_record(self, event: int, stream: int) -> None:
        self._note("record", stream, event)

    def note_wait(self, event: int, stream: int) -> None:
        self._note("wait", stream, event)

    def host_waited_for_event(self, event: int) -> None:
        self._note("host", event=event)

    def host_waited_for_stream(self, stream: int) -> None:
        self._note("host", stream)

    def host_waited(self) -> None:
        self._note("host")

    # -- graphs -----------------------------------------------------------------------------------

    def capture_begins(self, graph: Any) -> None:
        with self._lock:
            self._drain()
            self._graph = self._graphs[graph] = _Graph()

    def capture_ends(self) -> None:
        with self._lock:
            self._drain()
            self._graph = None

    def note_replay(self, graph: Any, frame: FrameType | None) -> None:
        """All that was captured is asked for again, in the stream of now."""
        with self._lock:
            made = self._graphs.get(graph)
            if made is None or self._graph is not None:
                return
            moment = self._begin(self._gpu.device_now())
            frame, site = caller_of_now(frame)
            for number, use in made.uses.values():
                again = Use(
                    moment,
                    use.region,
                    use.is_write,
                    f"{use.what} of the graph",
                    site,
                    use.launch,
                    use.argument,
                    use.is_sure,
                )
                for found in self._ledger.use(number, again):
                    self._telling.note(found, self._now, frame, in_graph=self.is_capturing)


def fields_of(watch: StreamWatch) -> dict[str, Any]:
    """Those of an OrderWatched."""
    return {
        "num_operations": watch.num_operations,
        "num_launches": watch.num_launches,
        "streams": tuple(watch.streams),
        "num_waits": watch.num_waits,
        "num_dropped": watch.num_dropped,
        "problem": watch.problem,
    }
