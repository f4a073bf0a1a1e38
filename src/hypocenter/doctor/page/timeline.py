"""What the host did, event by event, as plain records: allocations, copies, launches, the fault.

Runs have no clock: `seq` orders events, and a launch of a plan comes after the event of its step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypocenter.base.wording import count_text, signal_name
from hypocenter.doctor.case import Case
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.engine_events import Answered
from hypocenter.record.events import (
    OUTSIDE_PLANS,
    Allocated,
    AnyEvent,
    Called,
    Captured,
    Copied,
    Freed,
    GraphReplayed,
    HostWrote,
    IdsLearned,
    Launched,
    LaunchRecord,
    Place,
    Rejected,
    ScalarValue,
    Stepped,
    StreamEvent,
    Waited,
)

Facts = dict[str, ScalarValue]


class Kind(enum.StrEnum):
    """What a moment is of."""

    STEP = "step"
    ALLOCATION = "allocation"
    FREE = "free"
    COPY = "copy"
    LAUNCH = "launch"
    WAIT = "wait"
    GRAPH = "graph"
    HOST = "host"
    REFUSED = "refused"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that was done, `seq` as its event has it; `name` is what it was done to.

    `text` says it in words without the name. `is_under_way`: it may not have ended before the
    fault. `allocation` is the id of the memory, None where it is not about one.
    """

    seq: int
    step: int
    kind: Kind
    name: str
    text: str = ""
    site: str = ""
    stream: str = ""
    place: Place | None = None
    allocation: int | None = None
    is_under_way: bool = False
    facts: Facts = field(default_factory=dict)


def moments(case: Case) -> Iterator[Moment]:
    """Everything that was recorded, in the order in which the host did it; the fault is last."""
    under_way = {use.place for use in case.index.under_way}
    is_known = case.bundle.fault.kind in ("crash", "hang")
    for event in case.index.events:
        if isinstance(event, Stepped | Launched | GraphReplayed):
            if isinstance(event, Stepped):
                yield _step(case, event)
            elif isinstance(event, GraphReplayed):
                yield _replay(event)
            elif event.graph:
                yield _capture_of(event)
            for use in case.index.launches_of(event):
                yield launch_moment(use, is_under_way=is_known and use.place in under_way)
        elif (moment := _moment(case, event)) is not None:
            yield moment
    if (last := _fault(case)) is not None:
        yield last


def launch_moment(use: LaunchMade, *, is_under_way: bool = False) -> Moment:
    """A launch as a moment."""
    launch = use.launch
    facts: Facts = {"grid": _sizes(launch.grid)}
    facts |= {"warps": launch.num_warps} if launch.num_warps else {}
    facts |= launch.constants
    return Moment(
        use.seq,
        use.step,
        Kind.LAUNCH,
        launch.kernel,
        f"grid {_sizes(launch.grid)}",
        launch.site,
        launch.stream,
        use.place,
        is_under_way=is_under_way,
        facts=facts,
    )


def _step(case: Case, event: Stepped) -> Moment:
    plan = case.plans.get(event.plan)
    num_tokens = sum(request.num_tokens for request in event.requests)
    parts = [
        f"replays graph {event.graph}" if event.graph else "",
        count_text(len(plan.launches), "launch", "launches") if plan else "",
        f"{count_text(num_tokens, 'token')} of {count_text(len(event.requests), 'request')}"
        if event.requests
        else "",
    ]
    return Moment(
        event.seq,
        event.step,
        Kind.STEP,
        plan.name if plan else f"plan {event.plan}",
        ", ".join(filter(None, parts)),
        facts={"tokens": num_tokens, "requests": len(event.requests), "graph": event.graph},
    )


def _replay(event: GraphReplayed) -> Moment:
    name, text = f"graph {event.graph}", "is replayed"
    return Moment(event.seq, event.step, Kind.GRAPH, name, text, event.site, event.stream)


def _capture_of(event: Launched) -> Moment:
    """A launch that a graph takes; it runs later."""
    kernel, graph = event.launch.kernel, f"graph {event.graph}"
    text = f"takes a launch of {kernel}" + (", compiled for it" if event.compiled else "")
    return Moment(event.seq, event.step, Kind.GRAPH, graph, text, event.launch.site)


def _moment(case: Case, event: AnyEvent) -> Moment | None:
    """The moment of an event that makes no launch; None for what only the engine's books need."""
    at = (event.seq, event.step)
    match event:
        case Allocated(allocation=memory):
            text = f"{memory.num_bytes} bytes at {memory.address:#x}"
            facts: Facts = {"bytes": memory.num_bytes, "address": hex(memory.address)}
            return Moment(
                *at,
                Kind.ALLOCATION,
                _memory(case, memory.id),
                text,
                memory.site,
                allocation=memory.id,
                facts=facts,
            )
        case Freed():
            name = _memory(case, event.allocation)
            return Moment(*at, Kind.FREE, name, "", event.site, allocation=event.allocation)
        case Copied():
            return _copy(case, event)
        case Waited():
            text = f"for the copy that was asked for in step {event.copied_in}"
            return Moment(*at, Kind.WAIT, _tensor(case, event.tensor), text)
        case StreamEvent():
            text = f"event {event.event}"
            name = {"record": "records", "wait": "waits for"}.get(event.action, event.action)
            return Moment(*at, Kind.WAIT, name, text, event.site, event.stream)
        case Captured():
            text = f"takes the launches of plan {event.plan}"
            if event.plan == OUTSIDE_PLANS:
                text = "is captured from here on"
            return Moment(*at, Kind.GRAPH, f"graph {event.graph}", text, event.site)
        case HostWrote():
            text = f"{event.num_bytes} bytes at {event.host_address:#x}"
            return Moment(*at, Kind.HOST, "a pinned buffer", text, event.site)
        case Called():
            return Moment(*at, Kind.HOST, event.call, event.outcome, event.site)
        case Rejected():
            return Moment(*at, Kind.REFUSED, event.what, str(event.refusal))
        case IdsLearned() | Answered() | Stepped() | Launched() | GraphReplayed():
            return None
    return None


def _copy(case: Case, event: Copied) -> Moment:
    tensor = case.tensors.get(event.tensor) if event.tensor is not None else None
    way = "to the host" if event.direction == "out" else "to the device"
    pinned = ", not waited for" if event.is_pinned else ""
    return Moment(
        event.seq,
        event.step,
        Kind.COPY,
        tensor.name if tensor else hex(event.address),
        f"{way}, {event.num_bytes} bytes{pinned}",
        event.site,
        event.stream,
        allocation=tensor.allocation if tensor else None,
        facts={"bytes": event.num_bytes, "direction": event.direction, "pinned": event.is_pinned},
    )


def _fault(case: Case) -> Moment | None:
    fault = case.bundle.fault
    if fault.kind == "none":
        return None
    events = case.index.events
    name = {
        "crash": "the run crashed",
        "hang": "the run hung",
        "error": "the run ended in an error",
        "nonfinite": "NaN or infinity",
        "differs": "another answer than the good run's",
    }.get(fault.kind, fault.kind)
    facts: Facts = {"message": fault.message[:2000]}
    facts |= {"signal": signal_name(fault.signal)} if fault.signal else {}
    facts |= {"address": hex(fault.address)} if fault.address is not None else {}
    text = f"reported at {fault.call}" if fault.call else ""
    last = events[-1] if events else None
    return Moment(
        last.seq + 1 if last else 0, last.step if last else 0, Kind.FAULT, name, text, facts=facts
    )


def touched_by(case: Case, launch: LaunchRecord) -> frozenset[int]:
    """The ids of all allocations that a launch was given."""
    found = (
        case.tensors[given.tensor].allocation
        for given in (*launch.arguments, *launch.facts)
        if given.tensor in case.tensors
    )
    return frozenset(found)


def _memory(case: Case, number: int) -> str:
    memory = case.allocations.get(number)
    return memory.name if memory is not None and memory.name else f"allocation {number}"


def _tensor(case: Case, number: int | None) -> str:
    tensor = case.tensors.get(number) if number is not None else None
    return tensor.name if tensor is not None else "a tensor"


def _sizes(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)) or "none"
