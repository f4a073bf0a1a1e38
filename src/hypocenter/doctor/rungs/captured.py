"""Rung: pointers that a captured graph holds, and whether their memory lived when it ran."""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.events import Captured, Freed, LaunchRecord, Place, Stepped
from hypocenter.record.gap import Gap

NAME = "captured pointers"


@dataclass(frozen=True, slots=True)
class _Dangling:
    captured: Captured
    freed: Freed
    replayed: Stepped


def captured_pointers(case: Case) -> list[Claim]:
    """Graphs that ran after memory which they point into was freed."""
    graphs = case.index.events_of(Captured)
    if case.is_foreign or not case.bundle.events:
        reason = "captured pointers: no graph of this run would have been recorded"
        return [row(Cause.CAPTURED_POINTER, Verdict.NOT_TESTED, NAME, reason)]
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
        replays = sum(step.graph > 0 for step in case.index.events_of(Stepped))
        return [
            row(
                Cause.CAPTURED_POINTER,
                Verdict.REFUTED,
                NAME,
                f"the memory of {len(graphs)} captured graphs lived at each of their {replays} "
                "replays",
                would_refute="memory of a graph that was freed before a replay",
            )
        ]
    first = {dangling.freed.allocation: dangling for dangling in reversed(wrong)}
    return [_claim(case, dangling) for dangling in first.values()]


def _dangling(case: Case, kept: frozenset[int]) -> list[_Dangling]:
    """Replays over freed memory, as if the allocations `kept` had not been freed."""
    graphs = {event.graph: event for event in case.index.events_of(Captured)}
    found = []
    for step in case.index.events_of(Stepped):
        graph = graphs.get(step.graph)
        for number in graph.allocations if graph else ():
            freed = case.freed.get(number)
            if graph and freed and number not in kept and graph.seq < freed.seq < step.seq:
                found.append(_Dangling(graph, freed, step))
    return found


def _claim(case: Case, dangling: _Dangling) -> Claim:
    number = dangling.freed.allocation
    memory = case.allocations.get(number)
    name = memory.name if memory else f"allocation {number}"
    place, launch, argument = _user(case, dangling)
    still = _dangling(case, frozenset({number}))
    left = [other for other in still if other.freed.allocation == number]
    red = (
        f"graph {dangling.captured.graph}, captured in step {dangling.captured.step}, was replayed "
        f"in step {dangling.replayed.step} over {name}, which was freed in step "
        f"{dangling.freed.step} ({dangling.freed.site})"
    )
    access = case.access(launch, argument) if launch and argument else None
    root = RootCause(
        cause=Cause.CAPTURED_POINTER,
        sentence=red,
        fix=f"Keep {name} while graph {dangling.captured.graph} lives, or capture the graph anew "
        f"after it is freed at {dangling.freed.site}",
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
    reused = [
        other.name
        for other in case.allocations.values()
        if memory
        and other.id != number
        and case.index.allocated[other.id].seq > dangling.freed.seq
        and other.address < memory.address + memory.num_bytes
        and memory.address < other.address + other.num_bytes
    ]
    evidence = (f"its memory now belongs to {', '.join(reused)}",) if reused else ()
    tensors = tuple(t.id for t in case.tensors.values() if t.allocation == number)
    return proven(root, NAME, evidence, "a capture after the free", dangling.freed.seq, tensors)


def _user(case: Case, dangling: _Dangling) -> tuple[Place | None, LaunchRecord | None, str | None]:
    """The first launch of the graph's plan with an argument in the freed memory."""
    plan = case.plans.get(dangling.captured.plan)
    for number, launch in enumerate(plan.launches if plan else ()):
        for name, tensor in case.tensors_of(launch).items():
            if tensor.allocation == dangling.freed.allocation:
                return Place(dangling.replayed.step, dangling.captured.plan, number), launch, name
    return None, None, None
