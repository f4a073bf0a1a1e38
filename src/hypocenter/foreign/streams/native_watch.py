"""The watch over streams whose operations machine code sees: Python has what several streams use.

What one stream alone uses is in order by itself. `order.h` keeps it, and hands a memory over with
the uses that it has had as soon as another stream comes to it, or a graph is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from hypocenter.foreign.caller import caller_of_now
from hypocenter.foreign.ops.native import NativeOps
from hypocenter.foreign.streams.gpu import OF_HOST, Gpu
from hypocenter.foreign.streams.storages import KnownStorage
from hypocenter.foreign.streams.telling import BACKWARD
from hypocenter.foreign.streams.watch import StreamWatch, Tell, Work
from hypocenter.order.clocks import HOST
from hypocenter.order.extents import Extent
from hypocenter.order.ledger import MAX_USES, Instant, Use
from hypocenter.record.order_events import OrderStep


class KeptUse(NamedTuple):
    """A use as machine code kept it, in its order; `num_steps` are those before it."""

    number: int
    num_steps: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    is_write: bool
    what: str
    site: str
    launch: int
    argument: str


class NativeStreamWatch(StreamWatch):
    """As StreamWatch; operations come by `native`, and not by `operation`."""

    def __init__(
        self, gpu: Gpu, tell: Tell, native: NativeOps, *, is_pretended: bool = False
    ) -> None:
        super().__init__(gpu, tell)
        self._code = native.code.order
        self._storages.note_gone = self._code.note_gone
        native.asked.told.append(self._note_failed)
        self._code.start(self, MAX_USES, is_pretended)

    def _note_failed(self, error: BaseException) -> None:
        self.problem = self.problem or f"{type(error).__name__}: {error}"
        self._num_failed += 1
        if self.is_quiet:
            self._code.stop()

    def end(self) -> None:
        """Nothing more is noted."""
        self.num_operations += self._code.num_operations()
        self._code.stop()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """What torch does within is not the program's."""
        self._code.quiet(1)
        try:
            with super().quiet():
                yield
        finally:
            self._code.quiet(-1)

    # -- what the machine code asks ---------------------------------------------------------------

    def stream_now(self, device: int) -> str:
        """The name of the stream that this thread's work goes to."""
        return self._stream(self._gpu.stream_now(device), device)

    def drain(self) -> None:
        """Memory went away."""
        with self._lock:
            self._drain()

    def adopt(
        self, tensor: Any, made_in: str, used_in: str, site: str, uses: list[tuple[Any, ...]]
    ) -> None:
        """A memory is Python's from now on: where it was made, and what one stream did with it."""
        with self._lock:
            known, is_new = self._storages.add(tensor.untyped_storage(), made_in)
            if not is_new:
                return
            if used_in != made_in:
                self._storages.share(known.number)
            kept = [_use_of(used_in, KeptUse(*use)) for use in uses]
            region = known.extent if made_in or not kept else kept[0].region
            made = (site or BACKWARD) if made_in else ""
            self._ledger.adopt(known.number, made_in or HOST, region, made, kept)

    def note_new(self, tensor: Any, stream: str, site: str) -> None:
        """New memory, which may be of what another stream still uses."""
        with self._lock:
            self._new(tensor.untyped_storage(), stream, site or BACKWARD)
            self._tell_freed()

    def use(
        self, tensor: Any, stream: str, number: int, is_write: bool, what: str, name: str, site: str
    ) -> None:
        """A use of memory that is Python's."""
        with self._lock:
            self._drain()
            moment = self._moment(stream, number)
            frame, _ = caller_of_now()
            work = Work(what, site or BACKWARD, frame)
            super()._use(tensor, moment, is_write, work, argument=name)

    def use_of_host(self, tensor: Any, is_write: bool, what: str) -> None:
        """The host uses memory that a stream copies from or to."""
        with self._lock:
            frame, site = caller_of_now()
            self._use_of_host(tensor, is_write, Work(what, site, frame))

    def host_waits(self, stream: str) -> None:
        """A number of a tensor was asked for."""
        with self._lock:
            self._take(OrderStep("host", stream))

    def copy(
        self,
        source: Any,
        into: Any,
        place: tuple[str, int],
        what: str,
        site: str,
        is_out: bool,
        is_asked: bool,
    ) -> None:
        """A copy between host and GPU: what it does to the host's memory, and to the order.

        `place` is the stream, and the number that the copy has in it.
        """
        with self._lock:
            moment = self._moment(*place)
            frame, _ = caller_of_now()
            work = Work(what, site or BACKWARD, frame)
            self._copy(source, into, moment, work, is_out=is_out, is_asked=is_asked)

    def keep_for(self, tensor: Any, stream_id: int, index: int, kind: int) -> None:
        """record_stream was called, with a stream by torch's three numbers."""
        stream = SimpleNamespace(stream_id=stream_id, device_index=index, device_type=kind)
        with self._lock:
            self._keep_for(tensor, stream)

    # -- the same as in Python, where that is asked -----------------------------------------------

    def _moment(self, stream: str, number: int) -> Instant:
        """When work was asked for whose number the machine code has counted."""
        if self._graph is not None:
            return self._graph.ledger.begin(stream)
        self._catch_up()
        return Instant(stream, number, self._ledger.num_steps)

    def _begin(self, device: int) -> Instant:
        self._drain()
        name = self._stream(self._gpu.stream_now(device), device)
        number = self._code.tick(name) if self._graph is None else 0
        return self._moment(name, number)

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
        is_kept = (
            self._graph is None
            and region is None
            and self._gpu.place_of(tensor) != OF_HOST
            and self._code.use(
                tensor,
                moment.stream,
                moment.number,
                is_write,
                work.what,
                argument,
                work.site,
                launch,
            )
        )
        if not is_kept:
            super()._use(
                tensor,
                moment,
                is_write,
                work,
                argument=argument,
                launch=launch,
                region=region,
            )

    def _memory(self, tensor: Any) -> KnownStorage:
        is_of_host = self._gpu.place_of(tensor) == OF_HOST
        if not is_of_host:
            self._code.hand_over(tensor)
        known = super()._memory(tensor)
        if is_of_host:
            self._code.watch_of_host(tensor, True)
        return known

    def _drain(self) -> None:
        super()._drain()
        self._tell_freed()

    def _tell_freed(self) -> None:
        for stream, is_waiting in self._ledger.take_freed():
            self._code.set_has_freed(stream, is_waiting)

    def _catch_up(self) -> None:
        """Count what the machine code has seen since."""
        for stream, number in self._code.counts():
            self._ledger.clocks.catch_up(stream, number)

    def _stream(self, number: int, device: int) -> str:
        name = super()._stream(number, device)
        if self._ledger.clocks.has_blocking:
            self._code.set_pythons(True)
        return name

    def _take(self, step: OrderStep) -> None:
        self._catch_up()
        super()._take(step)
        if self._graph is None:
            self._code.set_num_steps(self._ledger.num_steps)
            if step.stream:
                self._code.set_count(step.stream, self._ledger.clocks.now.get(step.stream, 0))

    def capture_begins(self, graph: Any) -> None:
        super().capture_begins(graph)
        self._code.set_pythons(True)

    def capture_ends(self) -> None:
        super().capture_ends()
        self._code.set_pythons(self._ledger.clocks.has_blocking)


def _use_of(stream: str, kept: KeptUse) -> Use:
    return Use(
        Instant(stream, kept.number, kept.num_steps),
        Extent(kept.address, kept.shape, kept.strides, kept.item_bytes),
        kept.is_write,
        kept.what,
        kept.site or BACKWARD,
        kept.launch,
        kept.argument,
        is_sure=not kept.launch,
    )
