"""Which uses of memory nothing orders: each use is held against the earlier ones that matter.

Takes what a program asks for as it asks for it. What it keeps does not grow with the length of a
run: of a memory the uses that no later one stands for, of freed memory what a stream may still use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hypocenter.order.clocks import HOST, Clocks
from hypocenter.order.extents import Extent, covers, share
from hypocenter.record.order_events import Disorder, OrderStep

#: Uses of one memory, and freed memories of one stream, that are kept; then the oldest goes, which
#: may hide something and makes nothing up.
MAX_USES, MAX_FREED = 64, 256
#: Steps that are kept to show what lies between two uses.
MAX_STEPS = 4096
#: torch's allocator gives out multiples of 512 bytes, and has memory of its own for 1 MiB and less
#: (c10/cuda/CUDACachingAllocator: kMinBlockSize, kSmallSize).
_ROUND_BYTES, _SMALL_BYTES = 512, 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Instant:
    """When something was asked for: its stream, its number there, how many steps were before."""

    stream: str
    number: int
    num_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """Work that reads or writes a part of a memory: `what` and `site` say which.

    `is_sure`: it uses every byte of the region; else it may use some of them.
    """

    moment: Instant
    region: Extent
    is_write: bool
    what: str
    site: str
    launch: int = 0
    argument: str = ""
    is_sure: bool = True


@dataclass(slots=True, eq=False)
class Released:
    """Memory that was given back while other streams may still use it, by these uses."""

    number: int
    region: Extent
    uses: tuple[Use, ...]
    made: str
    site: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two uses without order; of what was REUSED `freed`, and whether it is the very memory."""

    kind: Disorder
    memory: int
    first: Use
    second: Use
    freed: Released | None = None
    is_same: bool = True


@dataclass(slots=True, eq=False)
class _Memory:
    """`stream` is the one that it was made in, "the host" of host memory."""

    stream: str
    region: Extent
    made: str = ""
    uses: list[Use] = field(default_factory=list)
    kept_for: set[str] = field(default_factory=set)
    before: list[tuple[Released, bool]] = field(default_factory=list)


class Ledger:
    """The order of one program, or of one graph."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self._memories: dict[int, _Memory] = {}
        self._freed: dict[str, deque[Released]] = {}
        self._steps: deque[OrderStep] = deque(maxlen=MAX_STEPS)
        self._blocking: list[OrderStep] = []
        self.num_steps = 0

    # -- order ------------------------------------------------------------------------------------

    def begin(self, stream: str) -> Instant:
        """Work is asked for in a stream, or done by the host; its uses follow."""
        return Instant(stream, self.clocks.tick(stream), self.num_steps)

    def step(self, step: OrderStep) -> None:
        """Something that orders."""
        take(self.clocks, step)
        if step.action == "blocking":
            self._blocking.append(step)
            return
        self._steps.append(step)
        self.num_steps += 1

    def between(self, first: Instant) -> tuple[tuple[OrderStep, ...], bool]:
        """The steps since `first`, and whether the beginning of them is gone."""
        wanted = self.num_steps - first.num_steps
        kept = [*self._steps][max(len(self._steps) - wanted, 0) :] if wanted else []
        return (*self._blocking, *kept), len(kept) < wanted

    # -- memory -----------------------------------------------------------------------------------

    def make(self, number: int, stream: str, region: Extent, made: str = "") -> None:
        """Memory `number` is there; what it is of may have been freed a moment ago."""
        memory = self._memories[number] = _Memory(stream, region, made)
        waiting = self._freed.get(stream)
        if not waiting:
            return
        left: deque[Released] = deque(maxlen=MAX_FREED)
        for freed in waiting:
            open_uses = self._open(freed.uses, stream)
            if not open_uses:
                continue
            freed.uses = open_uses
            left.append(freed)
            is_same = bool(share(freed.region, region))
            if is_same or _fits(region, freed.region):
                memory.before.append((freed, is_same))
        self._freed[stream] = left

    def adopt(self, number: int, stream: str, region: Extent, made: str, uses: list[Use]) -> None:
        """Memory `number` was there before, used in one stream alone, in this order."""
        self._memories[number] = _Memory(stream, region, made, uses)

    def take_freed(self) -> Iterator[tuple[str, bool]]:
        """Streams whose memory was given back, and whether others may still use some of it."""
        return ((stream, bool(waiting)) for stream, waiting in self._freed.items())

    def keep_for(self, number: int, stream: str) -> None:
        """record_stream: once freed it is not given out before `stream` is through with it."""
        if (memory := self._memories.get(number)) is not None:
            memory.kept_for.add(stream)

    def free(self, number: int, site: Callable[[], str]) -> None:
        """Memory is given back; `site` is asked where another stream may still use it."""
        memory = self._memories.pop(number, None)
        if memory is None:
            return
        others = [use for use in memory.uses if use.moment.stream not in memory.kept_for]
        uses = self._open(others, memory.stream)
        if uses and memory.stream != HOST:
            waiting = self._freed.setdefault(memory.stream, deque(maxlen=MAX_FREED))
            waiting.append(Released(number, memory.region, uses, memory.made, site()))

    def _open(
        self, uses: Iterator[Use] | list[Use] | tuple[Use, ...], stream: str
    ) -> tuple[Use, ...]:
        """Those that what the host asks for in a stream now would not come behind."""
        clocks = self.clocks
        return tuple(
            use
            for use in uses
            if use.moment.stream != stream
            and not clocks.is_before(use.moment.stream, use.moment.number, stream)
            and not clocks.is_before(use.moment.stream, use.moment.number, HOST)
        )

    def made_at(self, number: int) -> str:
        """Where a memory was made; "" where that was not seen."""
        memory = self._memories.get(number)
        return memory.made if memory is not None else ""

    def use(self, number: int, use: Use) -> list[Conflict]:
        """A memory is used; gives the earlier uses that nothing orders with this one."""
        memory = self._memories.get(number)
        if memory is None:
            # Nobody saw it made: whose it is when it is freed is not known.
            memory = self._memories[number] = _Memory(HOST, use.region)
        found: list[Conflict] = []
        if memory.before:
            found += self._against_freed(number, memory, use)
        stream = use.moment.stream
        is_before, left = self.clocks.is_before, []
        for other in memory.uses:
            moment = other.moment
            if moment.stream == stream or is_before(moment.stream, moment.number, stream):
                # A later use stands for it: whatever is unordered with the one is with the other.
                if (use.is_write or not other.is_write) and covers(use.region, other.region):
                    continue
            elif (use.is_write or other.is_write) and share(use.region, other.region):
                found.append(Conflict(_kind(other, use), number, other, use))
            left.append(other)
        left.append(use)
        memory.uses = left if len(left) <= MAX_USES else left[-MAX_USES:]
        return found

    def _against_freed(self, number: int, memory: _Memory, use: Use) -> Iterator[Conflict]:
        kept = []
        for freed, is_same in memory.before:
            uses = self._open(freed.uses, use.moment.stream)
            other = next((past for past in uses if past.is_write or use.is_write), None)
            if other is not None and (not is_same or share(freed.region, use.region)):
                yield Conflict(Disorder.REUSED, number, other, use, freed, is_same)
            elif uses:
                kept.append((freed, is_same))
        memory.before = kept


def take(clocks: Clocks, step: OrderStep) -> None:
    """What a step does to the order."""
    if step.action == "record":
        clocks.record(step.event, step.stream)
    elif step.action == "wait":
        clocks.wait(step.event, step.stream)
    elif step.action == "blocking":
        clocks.add_blocking(step.stream, step.other)
    elif step.event:
        clocks.host_waits_for(step.event)
    else:
        clocks.host_waits(step.stream or None)


def are_ordered(
    first: str, second: str, between: tuple[OrderStep, ...], *, with_wait: bool = False
) -> bool:
    """Whether work in stream `first` lies before later work in `second`, by what is between alone.

    `with_wait`: a wait of the second for all that the first has been asked for is added. No order
    of two uses can come of what was asked for before the first of them.
    """
    clocks = Clocks()
    clocks.tick(second)
    number = clocks.tick(first)
    for step in between:
        take(clocks, step)
    if with_wait:
        clocks.host_waits(first) if HOST in (first, second) else _wait(clocks, first, second)
    clocks.tick(second)
    return clocks.is_before(first, number, second)


def _wait(clocks: Clocks, first: str, second: str) -> None:
    clocks.record(0, first)
    clocks.wait(0, second)


def _kind(first: Use, second: Use) -> Disorder:
    if second.moment.stream == HOST:
        return Disorder.HOST_WRITE if second.is_write else Disorder.HOST_READ
    return Disorder.WAIT


def _fits(region: Extent, freed: Extent) -> bool:
    """Whether torch's allocator might give `region` of what was `freed`."""
    wanted, there = (_rounded_bytes(r) for r in (region, freed))
    return wanted <= there and (wanted <= _SMALL_BYTES) == (there <= _SMALL_BYTES)


def _rounded_bytes(region: Extent) -> int:
    start, end = region.span
    return -(-(end - start) // _ROUND_BYTES) * _ROUND_BYTES
