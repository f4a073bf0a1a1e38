"""Which memory of a device is still being written in which stream, as far as the host can know.

The host counts what it asks for in each stream, and what was waited for; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypocenter.base.tensor import Tensor

#: Stream to how many writes had been asked for there.
Ticks = dict[str, int]

_MAX_WRITES = 4096


class AddressRange(NamedTuple):
    """Addresses `start` to `end` of an allocation, and what writes them."""

    allocation: int
    start: int
    end: int
    what: str


@dataclass(slots=True, eq=False)
class Writes:
    """What `launches` write, looked up only when somebody asks, or what a copy does: `stretches`.

    `ticks` is when they were asked for last, per stream.
    """

    launches: Sequence[Any] = ()
    stretches: tuple[AddressRange, ...] = ()
    ticks: Ticks = field(default_factory=dict)

    def touching(self, tensor: Tensor, num_bytes: int) -> str:
        """What of this writes some of the first `num_bytes` of `tensor`; empty for nothing."""
        if self.launches and not self.stretches:
            self.stretches = tuple(self._of_launches())
        allocation, start = tensor.allocation.id, tensor.address
        for stretch in self.stretches:
            if (
                stretch.allocation == allocation
                and stretch.start < start + num_bytes
                and start < stretch.end
            ):
                return stretch.what
        return ""

    def _of_launches(self) -> Iterator[AddressRange]:
        for launch in self.launches:
            for name in getattr(launch.contract, "written", ()):
                if isinstance(to := launch.facts.get(name), Tensor):
                    end = to.address + to.extent_bytes
                    yield AddressRange(to.allocation.id, to.address, end, launch.kernel)


class StreamClocks:
    """The streams of one device; the default one is the empty name."""

    def __init__(self) -> None:
        self._ticks: Ticks = {}
        self._behind: dict[str, Ticks] = {}  # a stream to what it waits for
        self._done: Ticks = {}  # what the host has waited for
        self._writes: dict[Writes, None] = {}  # oldest first

    def wrote(self, writes: Writes, stream: str) -> None:
        """`writes` are about to be asked for in `stream`."""
        tick = self._ticks.get(stream, 0) + 1
        self._ticks[stream] = writes.ticks[stream] = tick
        self._writes[writes] = None
        if len(self._writes) > _MAX_WRITES:
            del self._writes[next(iter(self._writes))]

    def record_event(self, stream: str) -> Ticks:
        """What lies before an event that is recorded in `stream` now."""
        return self._behind.get(stream, {}) | {stream: self._ticks.get(stream, 0)}

    def waits(self, stream: str, event: Mapping[str, int]) -> None:
        """What follows in `stream` comes after an event."""
        _raise_to(self._behind.setdefault(stream, {}), event)

    def host_waited(self, event: Ticks | None) -> None:
        """The host has waited for an event (see `record_event`), or for everything."""
        _raise_to(self._done, self._ticks if event is None else event)
        for writes in [write for write in self._writes if self._is_done(write)]:
            del self._writes[writes]

    def num_pending(self, stream: str) -> int:
        """How many writes were asked for in `stream` since the host waited for it."""
        return self._ticks.get(stream, 0) - self._done.get(stream, 0)

    def missing_wait(self, tensor: Tensor, num_bytes: int, stream: str) -> tuple[str, str] | None:
        """What may still write to `tensor` as `stream` reads it, and in which other stream."""
        if not self._ticks or (len(self._ticks) == 1 and stream in self._ticks):
            return None  # as long as there is one stream
        behind = self._behind.get(stream, {})
        for writes in reversed(self._writes):
            for other, tick in writes.ticks.items():
                is_before = tick <= max(behind.get(other, 0), self._done.get(other, 0))
                if (
                    other != stream
                    and not is_before
                    and (what := writes.touching(tensor, num_bytes))
                ):
                    return what, other
        return None

    def _is_done(self, writes: Writes) -> bool:
        return all(tick <= self._done.get(stream, 0) for stream, tick in writes.ticks.items())


def _raise_to(ticks: Ticks, others: Mapping[str, int]) -> None:
    for stream, tick in others.items():
        ticks[stream] = max(tick, ticks.get(stream, 0))
