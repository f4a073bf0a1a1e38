"""What is told of two uses without order: each pair of places once, with what lies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from hypocenter.foreign.streams.names import StreamNames, tensor_name
from hypocenter.order.clocks import HOST
from hypocenter.order.ledger import Conflict, Ledger, Use
from hypocenter.record.order_events import Disordered, UseRecord

#: Pairs of places that are told of, and steps that a record of a pair holds.
MAX_TOLD, MAX_BETWEEN = 64, 512
BACKWARD = "the backward pass"


class Telling:
    """`tell` gets the fields of each Disordered; `num_dropped` pairs were too many."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._told: set[Any] = set()
        self._names = StreamNames()
        self.num_dropped = 0

    def note(
        self, found: Conflict, ledger: Ledger, frame: FrameType | None, *, in_graph: bool
    ) -> None:
        """Tell of a pair that `ledger` found; `frame` is where the second use is made."""
        first, second, released = found.first, found.second, found.freed
        if released is not None and BACKWARD in (first.site, released.made):
            return  # autograd keeps memory for other streams by itself, of which nobody tells
        key = found.kind, first.site, first.what, second.site, second.what
        if key in self._told:
            return
        if len(self._told) >= MAX_TOLD:
            self.num_dropped += 1
            return
        self._told.add(key)
        between, is_cut = ledger.between(first.moment)
        if len(between) > MAX_BETWEEN:
            between, is_cut = between[-MAX_BETWEEN:], True
        self._tell(
            {
                "kind": found.kind,
                "first": self._record(first, frame),
                "second": self._record(second, frame),
                "between": between,
                "is_cut": is_cut,
                "tensor": tensor_name(frame, second.region.address),
                "made": ledger.made_at(found.memory) if released is None else released.made,
                "freed": released.site if released is not None else "",
                "is_same": found.is_same,
                "is_whole": first.is_sure and second.is_sure,
                "graph": in_graph,
            }
        )

    def _record(self, use: Use, frame: FrameType | None) -> UseRecord:
        start, end = use.region.span
        stream = use.moment.stream
        return UseRecord(
            what=use.what,
            site=use.site,
            stream=stream,
            stream_name=stream if stream == HOST else self._names.of(frame, stream),
            is_write=use.is_write,
            address=start,
            end=end,
            launch=use.launch,
            argument=use.argument,
        )


def disorders(told: list[dict[str, Any]]) -> Iterator[Disordered]:
    """What was told, as a record has it."""
    for number, fields in enumerate(told, 1):
        yield Disordered(seq=number, step=0, **fields)
