"""Puts a look at captures and replays into torch's CUDAGraph, through which all of them go.

`torch.cuda.graph`, `make_graphed_callables` and torch.compile call its methods. Graphs that a
program captures past torch are not seen.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hypocenter.foreign.argument_facts import device_and_stream
from hypocenter.foreign.caller import caller_of_now
from hypocenter.foreign.recorder import ForeignRecorder
from hypocenter.foreign.seen_graphs import Segment

#: What torch says of a segment that is for all tensors.
_FOR_ALL = (0, 0)


class GraphWatch:
    """Watches torch's graphs; `recorder` gives what records, and `attempt` calls what may fail."""

    def __init__(
        self, recorder: Callable[[], ForeignRecorder | None], attempt: Callable[..., None]
    ) -> None:
        self._recorder, self._attempt = recorder, attempt
        #: The graph that a thread captures into.
        self._capturing: dict[int, Any] = {}
        #: Is told whether a graph is captured now, each time that this changes.
        self.listeners: list[Callable[[bool], None]] = []
        self._torch: Any = None

    def watch(self, torch: Any) -> None:
        """Have each capture and replay noted, from now on."""
        kind = getattr(torch.cuda, "CUDAGraph", None)
        if kind is None:
            return
        self._torch = torch
        begin, end, replay = kind.capture_begin, kind.capture_end, kind.replay

        @functools.wraps(begin)
        def capture_begin(graph: Any, *args: Any, **options: Any) -> Any:
            result = begin(graph, *args, **options)
            self._set({**self._capturing, threading.get_ident(): graph})
            self._attempt(self._note_begin, graph)
            return result

        @functools.wraps(end)
        def capture_end(graph: Any, *args: Any, **options: Any) -> Any:
            self._set({n: other for n, other in self._capturing.items() if other != graph})
            result = end(graph, *args, **options)
            self._attempt(self._note_end, graph)
            return result

        @functools.wraps(replay)
        def replay_graph(graph: Any, *args: Any, **options: Any) -> Any:
            self._attempt(self._note_replay, graph, sys._getframe(1))
            return replay(graph, *args, **options)

        kind.capture_begin, kind.capture_end, kind.replay = capture_begin, capture_end, replay_graph

    def _set(self, capturing: dict[int, Any]) -> None:
        self._capturing = capturing
        for listener in self.listeners:
            listener(bool(capturing))

    @property
    def captured_into(self) -> Any:
        """The graph that takes what this thread launches now; None where it runs."""
        if not self._capturing or not self._torch.cuda.is_current_stream_capturing():
            return None
        # A backward pass launches in a thread of torch's own.
        return self._capturing.get(threading.get_ident(), [*self._capturing.values()][-1])

    def _note_begin(self, graph: Any) -> None:
        if (opened := self._recorder()) is not None:
            opened.record_capture(graph)

    def _note_end(self, graph: Any) -> None:
        if (opened := self._recorder()) is not None:
            opened.record_captured(graph, self._segments(), caller_of_now()[1])

    def _note_replay(self, graph: Any, outside: FrameType) -> None:
        if (opened := self._recorder()) is not None:
            _, stream = device_and_stream(self._torch)
            opened.record_replay(graph, caller_of_now(outside)[1], stream)

    def _segments(self) -> list[Segment]:
        """All memory that torch's allocator has; it keeps the table on the host, or has none."""
        try:
            table = self._torch.cuda.memory_snapshot()
        except RuntimeError:  # an allocator that is not torch's own
            return []
        return [
            Segment(
                int(found["address"]),
                int(found["total_size"]),
                tuple(found.get("segment_pool_id", _FOR_ALL)) != _FOR_ALL,
            )
            for found in table
        ]
