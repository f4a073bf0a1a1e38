"""The life of the memory at a wrong address: made, given to launches, freed, reused, read.

Moments of the timeline, of one allocation and of those that lay at the same place later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case, array_of
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.doctor.page.address_space import AddressSpace, WrongAddress
from hypocenter.doctor.page.example_access import launch_of_root
from hypocenter.doctor.page.timeline import launch_moment, touched_by
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import AllocationRecord, Captured, Copied, Values

#: Allocations that a page tells the lives of, and owners of one place after another.
_MAX_LIVES, _MAX_REUSED = 2, 4


@dataclass(frozen=True, slots=True)
class LifeEvent:
    """Something that happened to a piece of memory: `verb` in one word, where and when."""

    seq: int
    step: int
    verb: str
    text: str
    site: str = ""
    is_wrong: bool = False
    #: Of a launch its number in its plan: all launches of a step have one event.
    launch: int = -1


@dataclass(frozen=True, slots=True)
class Life:
    """What became of one allocation, in order."""

    name: str
    num_bytes: int
    address: int
    changes: tuple[LifeEvent, ...]


def lives(case: Case, root: RootCause | None, space: AddressSpace | None) -> tuple[Life, ...]:
    """Of the memory that the wrong address lies in, and of the blamed tensor's."""
    if space is None:
        return ()
    use = launch_of_root(case, root) if root else None
    blamed = [block.allocation for block in space.blocks if block.is_blamed]
    if root is not None and use is not None and root.argument:
        tensor = case.tensor_of(use.launch, root.argument)
        blamed += [tensor.allocation] if tensor is not None else []
    chosen = dict.fromkeys((*_holding(case, space.wrong, blamed, use), *blamed))
    memories = [case.allocations[number] for number in chosen if number in case.allocations]
    return tuple(_life(case, memory, use) for memory in memories[:_MAX_LIVES])


def _holding(
    case: Case, wrong: WrongAddress | None, blamed: Sequence[int], use: LaunchMade | None
) -> list[int]:
    """The one allocation to tell of, of all that ever held the wrong address."""
    held = [
        memory.id
        for memory in case.allocations.values()
        if wrong is not None and memory.address <= wrong.start < memory.address + memory.num_bytes
    ]
    before = [n for n in held if use is None or case.index.allocated[n].seq < use.seq]
    same = [number for number in held if number in blamed]
    return [*same, *before[-1:], *held][:1]


def _life(case: Case, memory: AllocationRecord, wrong: LaunchMade | None) -> Life:
    found = [
        *_ends(case, memory, wrong),
        *_reuses(case, memory),
        *_host_writes(case, memory, wrong),
        *_uses(case, memory, wrong),
    ]
    found.sort(key=lambda change: (change.seq, change.launch))
    name = memory.name or f"allocation {memory.id}"
    return Life(name, memory.num_bytes, memory.address, tuple(found))


def _ends(case: Case, memory: AllocationRecord, wrong: LaunchMade | None) -> Iterator[LifeEvent]:
    made, freed = case.index.allocated[memory.id], case.freed.get(memory.id)
    owner = f" for {memory.owner}" if memory.owner else ""
    text = f"{memory.num_bytes} bytes at {memory.address:#x}{owner}"
    yield LifeEvent(made.seq, made.step, "made", text, memory.site)
    if freed is not None:
        is_wrong = wrong is not None and freed.seq < wrong.seq
        yield LifeEvent(freed.seq, freed.step, "freed", "", freed.site, is_wrong)
    for graph in case.index.events_of(Captured):
        if memory.id in graph.allocations:
            text = f"graph {graph.graph} keeps a pointer to it"
            yield LifeEvent(graph.seq, graph.step, "captured", text, graph.site)


def _host_writes(
    case: Case, memory: AllocationRecord, wrong: LaunchMade | None
) -> Iterator[LifeEvent]:
    """What the host put there last before it went wrong, and the last copy."""
    end = wrong.seq if wrong is not None else math.inf
    ours = {tensor.id for tensor in case.tensors.values() if tensor.allocation == memory.id}
    filled = [
        (event, values)
        for event in case.steps
        if event.seq <= end
        for values in event.inputs
        if values.tensor in ours
    ]
    for event, values in filled[-1:]:
        tensor = case.tensors[values.tensor]
        text = f"{tensor.name} = {first_values(values)}, as {values.dtype}"
        yield LifeEvent(event.seq, event.step, "filled by the host", text)
    copies = [event for event in case.index.events_of(Copied) if event.tensor in ours]
    for copy in copies[-1:]:
        way = "copied to the host" if copy.direction == "out" else "copied to the device"
        yield LifeEvent(copy.seq, copy.step, way, f"{copy.num_bytes} bytes", copy.site)


def _reuses(case: Case, memory: AllocationRecord) -> Iterator[LifeEvent]:
    """Whoever got the same place after it was freed."""
    freed = case.freed.get(memory.id)
    if freed is None:
        return
    end, num = memory.address + memory.num_bytes, 0
    for other in case.allocations.values():
        made = case.index.allocated[other.id]
        is_there = other.address < end and memory.address < other.address + other.num_bytes
        if other.id != memory.id and is_there and made.seq > freed.seq and num < _MAX_REUSED:
            num += 1
            yield LifeEvent(
                made.seq, made.step, "reused", f"{other.name} lies there now", other.site
            )


def _uses(case: Case, memory: AllocationRecord, wrong: LaunchMade | None) -> Iterator[LifeEvent]:
    """The first launch that got it, the last one before the end, and the one that went wrong."""
    seen: dict[int, bool] = {}
    users: list[LaunchMade] = []
    for use in case.launches:
        key = id(use.launch)
        if key not in seen:
            seen[key] = memory.id in touched_by(case, use.launch)
        if seen[key]:
            users.append(use)
    is_wrong = wrong is not None and any(use.place == wrong.place for use in users)
    told = [users[0], users[-1]] if users else []
    if wrong is not None and is_wrong:
        told = [*(use for use in told if use.place != wrong.place), wrong]
    names = {0: "first given to", len(users) - 1: "last given to"}
    for use in {use.place: use for use in told}.values():
        moment = launch_moment(use)
        at_fault = wrong is not None and use.place == wrong.place
        number = next(n for n, user in enumerate(users) if user.place == use.place)
        verb = "goes wrong in" if at_fault else names.get(number, "given to")
        which = f", launch {use.place.launch}" if use.place and use.place.plan >= 0 else ""
        users_text = count_text(len(users), "launch", "launches")
        text = f"{moment.name}, step {use.step}{which}; number {number + 1} of {users_text} with it"
        launch = use.place.launch if use.place is not None else 0
        yield LifeEvent(use.seq, use.step, verb, text, moment.site, at_fault, launch)


def first_values(values: Values, count: int = 8) -> str:
    """The first numbers of what was recorded; redacted ones are zeros."""
    flat = array_of(values).reshape(-1)
    numbers = flat[:count].tolist()
    shown = (f"{number:.6g}" if isinstance(number, float) else f"{number}" for number in numbers)
    return f"[{', '.join(shown)}{', ...' if flat.size > count else ''}]"
