"""Graphs that a program captures: the launches they took, and whether the memory of those lives.

What calls it is in `graph_hooks.py`. Memory of a graph's own pool is left out: the graph keeps it
after its last tensor has gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypocenter.foreign.run_log import RunLog
from hypocenter.foreign.seen_memory import SeenMemory, Storage
from hypocenter.record.events import (
    OUTSIDE_PLANS,
    Captured,
    GraphReplayed,
    Launched,
    Now,
    SourceRecord,
)

#: Captured launches that stay in the log, of all graphs together; more are written as others are.
MAX_CAPTURED = 4096


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that torch's allocator has from the driver; `is_private`: for graphs alone."""

    address: int
    num_bytes: int
    is_private: bool


@dataclass(slots=True)
class _Graph:
    """A graph from the beginning of its capture on; `captured` is set when that has ended.

    `storages` is what its launches point into, by number: after the capture what is watched of it.
    """

    number: int
    began: Now
    launches: list[Launched] = field(default_factory=list)
    sources: dict[str, SourceRecord] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)
    captured: Captured | None = None
    #: Numbers of the freed storages with which a replay has been told of.
    told: set[int] = field(default_factory=set)


class SeenGraphs:
    """The graphs of one process, by torch's objects for them, which it does not keep alive."""

    def __init__(self, log: RunLog, memory: SeenMemory) -> None:
        self._log, self._memory = log, memory
        self._graphs: weakref.WeakKeyDictionary[Any, _Graph] = weakref.WeakKeyDictionary()
        self._num_graphs = self._num_kept = 0

    def begin(self, graph: Any) -> None:
        """A capture into `graph` has begun."""
        self._graphs.pop(graph, None)
        self._num_kept = sum(len(seen.launches) for seen in self._graphs.values())
        self._num_graphs += 1
        self._graphs[graph] = _Graph(self._num_graphs, self._log.now())

    def number_of(self, graph: Any) -> int:
        """Of a graph that is being captured or was; 0 for one that nobody saw."""
        seen = self._graphs.get(graph)
        return seen.number if seen is not None else 0

    def take(
        self,
        graph: Any,
        event: Launched,
        sources: Sequence[SourceRecord],
        storages: Sequence[Storage],
    ) -> None:
        """A launch has been captured; writes it."""
        seen = self._graphs[graph]
        for storage in storages:
            storage.is_captured = True
            seen.storages[storage.number] = storage
        if self._num_kept >= MAX_CAPTURED:
            self._log.event(event)
            return
        self._num_kept += 1
        seen.launches.append(event)
        seen.sources.update((source.id, source) for source in sources)
        self._log.keep_event(event)

    def end(self, graph: Any, segments: Sequence[Segment], site: str) -> None:
        """The capture has ended well; `segments` is all memory that torch has by now."""
        seen = self._graphs.get(graph)
        if seen is None:
            return
        for storage in seen.storages.values():
            storage.is_captured = _is_watched(storage, segments)
        seen.storages = {n: one for n, one in seen.storages.items() if one.is_captured}
        seen.captured = Captured(
            **seen.began,
            graph=seen.number,
            plan=OUTSIDE_PLANS,
            allocations=tuple(seen.storages),
            site=site,
        )
        self._log.keep_event(seen.captured)

    def replay(self, graph: Any, site: str, stream: str) -> None:
        """A graph is about to run again: tells so, and of memory of it that has gone."""
        seen = self._graphs.get(graph)
        if seen is None or seen.captured is None:
            return
        has_news = False
        for storage in seen.storages.values():
            if storage.freed is None and storage.has_moved():
                self._memory.lose(storage, "")
            if storage.freed is not None and storage.number not in seen.told:
                seen.told.add(storage.number)
                has_news = True
        event = GraphReplayed(**self._log.now(), graph=seen.number, site=site, stream=stream)
        if has_news:
            self._log.keep_event(event)
        else:
            self._log.event(event)

    def write_again(self) -> None:
        """Into a log that began anew: the graphs that are there, and what they point into."""
        graphs = [seen for seen in self._graphs.values() if seen.captured is not None]
        sources = {source.id: source for seen in graphs for source in seen.sources.values()}
        storages = {number: one for seen in graphs for number, one in seen.storages.items()}
        for source in sources.values():
            self._log.static(source)
        for storage in storages.values():
            self._memory.write_again(storage)
        for seen in graphs:
            seen.told.clear()
            for event in seen.launches:
                self._log.keep_event(event)
            if seen.captured is not None:
                self._log.keep_event(seen.captured)


def _is_watched(storage: Storage, segments: Sequence[Segment]) -> bool:
    """Whether memory goes with its last tensor: not that of graphs, nor of other libraries."""
    memory = storage.made.allocation
    around = [
        segment
        for segment in segments
        if segment.address <= memory.address < segment.address + segment.num_bytes
    ]
    if any(segment.is_private for segment in around):
        return False
    return bool(around) or memory.kind != "device"
