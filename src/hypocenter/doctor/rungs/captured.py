"""Rung: pointers that a captured graph holds, and whether their memory lived when it ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.engine_events import Event
from hypocenter.record.events import (
    OUTSIDE_PLANS,
    AllocationRecord,
    Captured,
    Freed,
    GraphReplayed,
    Launched,
    LaunchRecord,
    Place,
    Stepped,
)
from hypocenter.record.gap import Gap

NAME = "captured pointers"


@dataclass(frozen=True, slots=True)
class _Dangling:
    captured: Captured
    freed: Freed
    replayed: Stepped | GraphReplayed


def captured_pointers(case: Case) -> list[Claim]:
    """Graphs that ran after memory which they point into was freed."""
    graphs = case.index.events_of(Captured)
    if not case.bundle.events or (case.is_foreign and not graphs):
        reason = "captured pointers: no graph of this run was seen"
        return [
            *_claims_of_compiled(case),
            row(Cause.CAPTURED_POINTER, Verdict.NOT_TESTED, NAME, reason),
        ]
    if not graphs and case.bundle.statistics:
        reason = "a traced run takes no graphs; a run without --suspect has them"
        case.leave_unseen(Gap.not_recorded("graphs", reason))
        return [row(Cause.CAPTURED_POINTER, Verdict.NOT_TESTED, NAME, reason)]
    if not graphs:
        return [
            row(
                Cause.CAPTURED_POINTER,
                Verdict.REFUTED,
                NAME,
                "no graph was captured in this run",
                would_refute="a captured graph",
            )
        ]
    wrong = _dangling(case, frozenset())
    if not wrong:
        return [*_claims_of_compiled(case), _claim_of_none(case, graphs)]
    first = {dangling.freed.allocation: dangling for dangling in reversed(wrong)}
    return [*_claims_of_compiled(case), *(_claim(case, dangling) for dangling in first.values())]


def _replays(case: Case) -> list[Stepped | GraphReplayed]:
    steps = [step for step in case.index.events_of(Stepped) if step.graph > 0]
    return [*steps, *case.index.events_of(GraphReplayed)]


def _claim_of_none(case: Case, graphs: tuple[Captured, ...]) -> Claim:
    """Nothing that is known was freed; of a program of anybody's that is not all there is."""
    num_replays = len(_replays(case))
    told = (
        f"the memory of {count_text(len(graphs), 'captured graph')} lived at each of "
        f"{'its' if len(graphs) == 1 else 'their'} {count_text(num_replays, 'replay')}"
    )
    if not any(graph.allocations for graph in graphs):
        told = (
            f"{count_text(len(graphs), 'graph')} captured, {count_text(num_replays, 'replay')}: no "
            "memory of torch's outside the graphs' own pools is known that they point into"
        )
    of_others = "pointers that kernels of torch's own hold in graphs are not known"
    return row(
        Cause.CAPTURED_POINTER,
        Verdict.INCONCLUSIVE if case.is_foreign else Verdict.REFUTED,
        NAME,
        told,
        *((of_others,) if case.is_foreign else ()),
        would_refute="memory of a graph that was freed before a replay",
    )


def _claims_of_compiled(case: Case) -> Iterator[Claim]:
    """Kernels that were compiled while a graph was captured, which a runtime may refuse."""
    ended = {event.graph for event in case.index.events_of(Captured)}
    for event in case.index.events_of(Launched):
        if event.compiled:
            is_ended = event.graph in ended
            yield row(
                Cause.CAPTURE_REFUSED,
                Verdict.REFUTED if is_ended else Verdict.INCONCLUSIVE,
                NAME,
                compiled_text(event),
                "the capture ended well" if is_ended else "the capture did not end",
                would_refute="a capture that ended well",
                kernel=event.launch.kernel,
            )


def compiled_text(event: Launched) -> str:
    """That a kernel was compiled for a launch that a graph took."""
    at = f" at {event.launch.site}" if event.launch.site else ""
    return (
        f"{event.launch.kernel} was compiled, or loaded from Triton's cache, for its launch{at}, "
        f"while graph {event.graph} was captured"
    )


def _dangling(case: Case, kept: frozenset[int]) -> list[_Dangling]:
    """Replays over freed memory, as if the allocations `kept` had not been freed."""
    graphs = {event.graph: event for event in case.index.events_of(Captured)}
    found = []
    for replay in _replays(case):
        graph = graphs.get(replay.graph)
        for number in graph.allocations if graph else ():
            freed = case.freed.get(number)
            if graph and freed and number not in kept and graph.seq < freed.seq < replay.seq:
                found.append(_Dangling(graph, freed, replay))
    return found


def _claim(case: Case, dangling: _Dangling) -> Claim:
    captured, freed = dangling.captured, dangling.freed
    number = freed.allocation
    memory = case.allocations.get(number)
    name = memory.name if memory else f"allocation {number}"
    place, launch, argument = _user(case, dangling)
    still = _dangling(case, frozenset({number}))
    left = [other for other in still if other.freed.allocation == number]
    red = (
        f"graph {captured.graph}, captured {_when(captured, captured.site)}, was replayed "
        f"{_when_replayed(dangling.replayed)} over {name}{_maker_text(case, number)}, which was "
        f"{_freed_text(case, freed)}"
    )
    access = case.access(launch, argument) if launch and argument else None
    after = f"it is freed at {freed.site}" if freed.site else "its memory has gone"
    root = RootCause(
        cause=Cause.CAPTURED_POINTER,
        sentence=red,
        fix=f"Keep {name} while graph {captured.graph} lives, or capture the graph anew after "
        f"{after}",
        proof=Proof(
            red,
            f"{name} not freed",
            f"{len(left)} of the graph's replays are over freed memory with {name} not freed",
        ),
        kernel=launch.kernel if launch else None,
        argument=argument,
        tensor=name,
        place=place,
    ).at(access)
    evidence = tuple(_heirs_text(case, memory, freed)) if memory else ()
    tensors = tuple(t.id for t in case.tensors.values() if t.allocation == number)
    return proven(root, NAME, evidence, "a capture after the free", freed.seq, tensors)


def _when(event: Event, site: str) -> str:
    """Of a program of anybody's its line, else the step."""
    return f"at {site}" if site else f"in step {event.step}"


def _when_replayed(event: Stepped | GraphReplayed) -> str:
    return _when(event, event.site if isinstance(event, GraphReplayed) else "")


def _maker_text(case: Case, number: int) -> str:
    """Where memory of a program of anybody's was made, or was given to a launch first."""
    memory = case.allocations.get(number)
    if memory is None or not case.is_foreign:
        return ""
    if memory.site:
        return f" (made at {memory.site})"
    for event in case.index.events_of(Launched):
        given = case.tensors_of(event.launch).values()
        if event.launch.site and any(tensor.allocation == number for tensor in given):
            return f" (first given to {event.launch.kernel} at {event.launch.site})"
    return ""


def _freed_text(case: Case, freed: Freed) -> str:
    if not freed.site:
        return "resized, or given other memory, before that"
    if not case.is_foreign:
        return f"freed in step {freed.step} ({freed.site})"
    return f"freed at {freed.site}" if ":" in freed.site else f"freed ({freed.site})"


def _heirs_text(case: Case, memory: AllocationRecord, freed: Freed) -> Iterator[str]:
    """Whose the memory is now, if that is known."""
    names = [
        other.name
        for other in case.allocations.values()
        if other.id != memory.id
        and case.index.allocated[other.id].seq > freed.seq
        and other.address < memory.address + memory.num_bytes
        and memory.address < other.address + other.num_bytes
    ]
    if names:
        yield f"its memory now belongs to {', '.join(names)}"


def _user(case: Case, dangling: _Dangling) -> tuple[Place | None, LaunchRecord | None, str | None]:
    """The graph's first launch with an argument in the freed memory."""
    for place, launch in _launches_of(case, dangling):
        for name, tensor in case.tensors_of(launch).items():
            if tensor.allocation == dangling.freed.allocation:
                return place, launch, name
    return None, None, None


def _launches_of(case: Case, dangling: _Dangling) -> Iterator[tuple[Place, LaunchRecord]]:
    captured = dangling.captured
    if captured.plan == OUTSIDE_PLANS:
        for event in case.index.events_of(Launched):
            if event.graph == captured.graph:
                yield Place(event.step, OUTSIDE_PLANS, event.seq), event.launch
        return
    plan = case.plans.get(captured.plan)
    for number, launch in enumerate(plan.launches if plan else ()):
        yield Place(dangling.replayed.step, captured.plan, number), launch
