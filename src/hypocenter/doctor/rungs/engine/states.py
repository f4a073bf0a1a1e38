"""Rung: whose states the slots of each step name, of models with layers that carry one.

A slot can be legal and hold the state of another request, or of other tokens. What each request
should read stands in the scheduler's record; what is in a slot follows from what was left there by
the steps before. Contents are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import Copied, RequestRecord, Stepped, TensorRecord

NAME = "states"
_INPUTS = ("state_slots", "state_sources", "checkpoint_slots", "checkpoint_stops")


@dataclass(frozen=True, slots=True)
class _Left:
    """What was left in a slot: by which request, behind how many of its tokens, in which step, and
    by which argument."""

    owner: int
    num_tokens: int
    step: int
    argument: str

    def __str__(self) -> str:
        return f"what request {self.owner} left in step {self.step} behind {self.num_tokens} tokens"


@dataclass(frozen=True, slots=True)
class _Wrong:
    """An entry that leads to another state than its request's; `found` is what it leads to, where
    somebody overwrote what it should."""

    event: Stepped
    argument: str
    row: int
    text: str
    correction: str
    found: _Left | None = None


def states(case: Case) -> list[Claim]:
    """The first sequence of each kind that reads or leaves a state where it should not."""
    events = [event for event in case.steps if _has_states(case, event)]
    if not events:
        return []
    claims: dict[str, Claim] = {}
    for wrong in _walk(case, events):
        if wrong.argument not in claims and (use := _first_use(case, wrong)) is not None:
            claims[wrong.argument] = _claim(case, use, wrong)
    if claims:
        return list(claims.values())
    num = sum(len(event.requests) for event in events)
    return [
        row(
            Cause.FOREIGN_STATE,
            Verdict.REFUTED,
            NAME,
            f"each of {num} sequences went on from the state behind its own tokens",
            would_refute="a slot that holds the state of another request, or of other tokens",
        )
    ]


def _has_states(case: Case, event: Stepped) -> bool:
    is_told = any(request.state_slot is not None for request in event.requests)
    return is_told and all(case.input_of(event, name) is not None for name in _INPUTS)


def left_there(case: Case, use: LaunchMade, token: int) -> str:
    """What was in the slot that a launch read for a token: whose, and since which step."""
    events = [event for event in case.steps if _has_states(case, event)]
    for event, held in _each_step(case, events):
        if event is not case.event_of(use):
            continue
        sources, first = _numbers(case, event, "state_sources"), 0
        for request in event.requests:
            if first <= token < first + request.num_tokens and request.row < len(sources):
                slot = sources[request.row]
                has = held.get(slot, "what nobody on record left")
                begins = "begins" if request.first_position == 0 else "goes on"
                return (
                    f"{has}, in slot {slot}, where request {request.id} {begins} in step "
                    f"{event.step}"
                )
            first += request.num_tokens
    return ""


def was_spoilt(case: Case, use: LaunchMade, state: TensorRecord) -> str:
    """How a state held what is no number before a launch; empty where nothing says that it did."""
    if use.place is None:
        return ""
    earlier = [
        statistics
        for statistics in case.bundle.statistics
        if statistics.tensor == state.id and statistics.place.step < use.place.step
    ]
    last = max(earlier, key=lambda statistics: statistics.place.step, default=None)
    if last is not None and (last.num_nan or last.num_inf or last.num_poisoned):
        return f"launch {last.place.launch} of step {last.place.step} left it so"
    since = last.place.step if last is not None else 0
    for copy in case.index.events_of(Copied):
        tensor = case.tensors.get(copy.tensor) if copy.tensor is not None else None
        is_there = tensor is not None and tensor.allocation == state.allocation
        if is_there and copy.direction == "in" and since <= copy.step < use.place.step:
            return f"a copy in step {copy.step} wrote into it{f' ({copy.site})' * bool(copy.site)}"
    return ""


def _walk(case: Case, events: list[Stepped]) -> Iterator[_Wrong]:
    for event, held in _each_step(case, events):
        slots, sources = (_numbers(case, event, name) for name in _INPUTS[:2])
        for request in event.requests:
            at = request.row
            if at < len(slots):
                yield from _wrong_entries(event, request, slots[at], sources[at], held)


def _each_step(case: Case, events: list[Stepped]) -> Iterator[tuple[Stepped, dict[int, _Left]]]:
    """Each step with what the slots hold before it."""
    held: dict[int, _Left] = {}
    for event in events:
        yield event, held
        slots, _, kept, stops = (_numbers(case, event, name) for name in _INPUTS)
        first = 0
        for request in event.requests:
            at, stop = request.row, request.first_position + request.num_tokens
            if at < len(slots):
                held[slots[at]] = _Left(request.id, stop, event.step, _INPUTS[0])
                if stops[at] > first:
                    num_tokens = request.first_position + stops[at] - first
                    held[kept[at]] = _Left(request.id, num_tokens, event.step, _INPUTS[2])
            first += request.num_tokens


def _numbers(case: Case, event: Stepped, name: str) -> list[int]:
    values = case.input_of(event, name)
    return [] if values is None else [int(value) for value in values]


def _wrong_entries(
    event: Stepped, request: RequestRecord, slot: int, source: int, held: dict[int, _Left]
) -> Iterator[_Wrong]:
    start, mine = request.first_position, request.state_slot
    at, found = request.row, held.get(source)
    has = f"has {found}" if found else "has a state of nobody on record"

    def make_wrong(argument: str, text: str, correction: str, found: _Left | None = None) -> _Wrong:
        return _Wrong(event, argument, at, text, correction, found)

    if mine is not None and slot != mine:
        yield make_wrong(
            "state_slots",
            f"state_slots[{at}] = {slot}, but request {request.id} has slot {mine}",
            f"state_slots[{at}] = {mine}",
        )
    if start == 0:
        return
    is_own = request.state_source in (None, mine)
    wanted = request.id if is_own else request.left_by
    if request.state_source is not None and source != request.state_source:
        right = held.get(request.state_source)
        yield make_wrong(
            "state_sources",
            f"state_sources[{at}] = {source} for position {start} of request {request.id}, and "
            f"slot {source} {has}; its own is in slot {request.state_source}",
            f"state_sources[{at}] = {request.state_source}"
            + (f", which has {right}" if right else ""),
        )
    elif found is not None and (found.owner, found.num_tokens) != (wanted, start):
        yield make_wrong(
            "state_sources",
            f"slot {source} {has}, but request {request.id} reads it in step {event.step} as that "
            f"of request {wanted} behind {start}",
            f"step {found.step} leaving the state of request {found.owner} in another slot",
            found,
        )


def _first_use(case: Case, wrong: _Wrong) -> LaunchMade | None:
    """The step's first launch that carries a state."""
    for use in case.index.launches_of(wrong.event):
        if any(fact.name == wrong.argument for fact in use.launch.facts):
            return use
    return None


def _claim(case: Case, use: LaunchMade, wrong: _Wrong) -> Claim:
    tensor = case.tensor_of(use.launch, wrong.argument)
    access = case.access(use.launch, wrong.argument)
    root = RootCause(
        cause=Cause.FOREIGN_STATE,
        sentence=f"{use.launch.kernel}: {wrong.text}",
        fix="Let a request begin only with what was left behind its own first tokens, and give a "
        "slot to nobody else while it is kept for that",
        proof=Proof(
            wrong.text,
            wrong.correction,
            "then what the sequence reads was left behind just the tokens before its first",
        ),
        kernel=use.launch.kernel,
        argument=wrong.argument,
        tensor=tensor.name if tensor else None,
        place=use.place,
    ).at(access)
    claim = proven(
        root,
        NAME,
        (f"{use.where}: {wrong.text}",),
        "the slot holding what the scheduler's record says",
        use.seq,
        (tensor.id,) if tensor else (),
    )
    left_by = (wrong.found.step, wrong.found.argument) if wrong.found is not None else None
    return replace(claim, left_by=left_by)
