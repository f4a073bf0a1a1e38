"""What waits to run on a simulated GPU: launches and copies in streams, and the order they take.

Runs nothing: `sim.py` does.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypocenter.device.backend import Bytes

#: Above this many programs their order is a cheaper shuffle.
_MAX_SHUFFLED = 1 << 16


@dataclass(slots=True, eq=False)
class SimEvent:
    """A place in a stream; `is_reached` once everything before it has run."""

    is_reached: bool = False


@dataclass(slots=True, eq=False)
class EventRecord:
    event: SimEvent


@dataclass(slots=True, eq=False)
class Wait:
    event: SimEvent


@dataclass(slots=True, eq=False)
class Mark:
    """Everything before it has run once `header[CELL_COMPLETED]` is `place_word`."""

    header: memoryview
    place_word: int


@dataclass(slots=True, eq=False)
class Copy:
    address: int
    data: Bytes


@dataclass(slots=True, eq=False)
class QueuedLaunch:
    jit: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    order: Iterator[int]
    values: dict[str, Any] | None = None
    num_steps: int = 0
    #: Machine code, on a device that executes it.
    code: Any = None


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call of a library; `arguments` are pointers, each with the bytes behind it."""

    name: str
    function: Callable[..., None]
    arguments: tuple[tuple[Any, int], ...]


Item = EventRecord | Wait | Mark | Copy | QueuedLaunch | QueuedCall


@dataclass(slots=True, eq=False)
class Streams:
    """What waits, in streams that know nothing of each other, and how much it is."""

    by_name: dict[str, deque[Item]] = field(default_factory=dict)
    current: str = "default"
    num_queued: int = 0
    staged_bytes: int = 0

    def add(self, item: Item, staged_bytes: int = 0) -> None:
        self.by_name.setdefault(self.current, deque()).append(item)
        self.num_queued += 1
        self.staged_bytes += staged_bytes

    def ready_queues(self) -> list[deque[Item]]:
        return [items for items in self.by_name.values() if items and not _is_held(items[0])]

    def is_stuck(self) -> bool:
        """Whether a stream still waits, for an event that nobody has recorded."""
        return any(self.by_name.values())

    def clear(self) -> None:
        self.by_name.clear()
        self.num_queued = self.staged_bytes = 0


def _is_held(item: Item) -> bool:
    return isinstance(item, Wait) and not item.event.is_reached


def shuffle(num_programs: int, source: random.Random) -> Iterator[int]:
    """Every program once; lazily for grids that would not fit a list."""
    if num_programs <= _MAX_SHUFFLED:
        return iter(source.sample(range(num_programs), num_programs))
    step = source.randrange(num_programs)
    while math.gcd(step, num_programs) != 1:
        step = source.randrange(num_programs)
    start = source.randrange(num_programs)
    return ((start + step * i) % num_programs for i in range(num_programs))
