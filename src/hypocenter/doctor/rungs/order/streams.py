"""Rung: the order of what the host asked for: streams, events, and pinned buffers in flight.

Happens-before from the recorded events alone: work in one stream is in order, an event carries the
order to the streams that wait for it, a host that waits has everything behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.rungs.order.program_order import program_order
from hypocenter.order.clocks import HOST, Clocks
from hypocenter.record.events import (
    AnyEvent,
    Copied,
    HostWrote,
    Launched,
    LaunchRecord,
    Place,
    Stepped,
    StreamEvent,
    Waited,
)

NAME = "order"
#: What speaks against a cause of which there is a proof.
_WOULD_REFUTE = {
    Cause.MISSING_WAIT: "a wait between the two",
    Cause.REWRITTEN_IN_FLIGHT: "a wait for the copy before the write",
    Cause.LOST_EVENT: "a record of that event before the wait",
}
#: What would speak for one that is refuted.
_WOULD_CONFIRM = {
    Cause.MISSING_WAIT: "two uses of one memory in two streams without a wait between them",
    Cause.REWRITTEN_IN_FLIGHT: "a write before the copy is known to have ended",
    Cause.LOST_EVENT: "a wait for an event that was recorded later or never",
}


@dataclass(frozen=True, slots=True)
class _Touch:
    """Work that reads or writes memory: who, in which stream, at which of its ticks."""

    what: str
    stream: str
    tick: int
    seq: int
    is_write: bool
    launch: LaunchRecord | None = None
    argument: str = ""
    place: Place | None = None
    site: str = ""
    tensor: int = -1


@dataclass(frozen=True, slots=True)
class _Disorder:
    cause: Cause
    first: _Touch
    second: _Touch
    text: str


def order(case: Case) -> list[Claim]:
    """Waits that are missing, and events that were never recorded."""
    if case.is_foreign:
        return program_order(case)
    events = case.bundle.events
    has_work = any(isinstance(event, Copied | StreamEvent) for event in events)
    if not case.launches and not has_work:
        return [
            row(cause, Verdict.NOT_TESTED, NAME, "order: no work of this run was recorded")
            for cause in _WOULD_REFUTE
        ]
    found = _disorder(case, events)
    claims = []
    seen: set[tuple[Cause, int, str]] = set()
    for disorder in found:
        key = (disorder.cause, disorder.second.tensor, disorder.second.argument)
        if key not in seen:
            seen.add(key)
            claims.append(_claim(case, events, disorder))
    streams = _streams(case)
    confirmed = {claim.hypothesis.cause for claim in claims}
    num_pinned = sum(isinstance(e, Copied) and e.is_pinned for e in events)
    texts = {
        Cause.MISSING_WAIT: f"work in {max(len(streams), 1)} "
        f"{'streams' if len(streams) > 1 else 'stream'} is ordered wherever it touches the same "
        "memory",
        Cause.REWRITTEN_IN_FLIGHT: f"none of {num_pinned} pinned buffers was changed before its "
        "copy was known to have ended",
        Cause.LOST_EVENT: "every event that was waited for had been recorded before",
    }
    return claims + [
        row(cause, Verdict.REFUTED, NAME, text, would_refute=_WOULD_CONFIRM[cause])
        for cause, text in texts.items()
        if cause not in confirmed
    ]


def _streams(case: Case) -> set[str]:
    """All streams that the run put work into; with one of them there is nothing to order."""
    of_events = {e.stream for e in case.bundle.events if isinstance(e, Copied | StreamEvent)}
    return of_events | {use.launch.stream for use in case.launches}


# -- the walk -------------------------------------------------------------------------------------


def _disorder(
    case: Case, events: Sequence[AnyEvent], waits: frozenset[int] = frozenset()
) -> list[_Disorder]:
    """Pairs in no order. Before each event of `waits` the host is taken to wait for everything."""
    clocks, found = Clocks(), list[_Disorder]()
    tensors: dict[int, list[_Touch]] = {}
    is_parallel = len(_streams(case)) > 1
    pinned: list[tuple[int, int, _Touch]] = []
    asked: dict[tuple[int, int | None], dict[str, int]] = {}  # copies that are waited for later
    begins = _beginnings(case, events) if is_parallel else {}
    for number, event in enumerate(events):
        for begun in begins.get(number, ()):
            for touch in _launch_touches(case, begun, clocks):
                found += _against(clocks, touch, tensors)
        if event.seq in waits:
            clocks.host_waits(None)
        if isinstance(event, StreamEvent):
            found += _stream_event(clocks, event)
        elif isinstance(event, HostWrote):
            found += _rewritten(clocks, event, pinned)
        elif isinstance(event, Copied):
            for touch in _copy_touches(case, event, clocks):
                found += _against(clocks, touch, tensors)
            if event.is_pinned and event.direction == "in":
                tick = clocks.now[event.stream]
                name = _tensor_name(case, event.tensor)
                number = -1 if event.tensor is None else event.tensor
                copy = _Touch(
                    f"the copy of {name} to the device",
                    event.stream,
                    tick,
                    event.seq,
                    False,
                    argument=name,
                    site=event.site,
                    tensor=number,
                )
                pinned.append((event.host_address, event.num_bytes, copy))
            if event.direction == "out" and event.is_pinned:
                asked[event.step, event.tensor] = clocks.behind(event.stream)
            elif event.direction == "out":
                clocks.host_waits(event.stream)
        elif isinstance(event, Waited):
            clocks.host_waited(asked.pop((event.copied_in, event.tensor), {}))
    for begun in begins.get(len(events), ()):
        for touch in _launch_touches(case, begun, clocks):
            found += _against(clocks, touch, tensors)
    return found


def _beginnings(case: Case, events: Sequence[AnyEvent]) -> dict[int, list[Stepped | Launched]]:
    """Before which event the launches of a step were made.

    A step is told before its inputs are copied; its launches come after these copies and after
    the waits behind them.
    """
    begins: dict[int, list[Stepped | Launched]] = {}
    for number, event in enumerate(events):
        if isinstance(event, Launched):
            begins.setdefault(number, []).append(event)
        if not isinstance(event, Stepped):
            continue
        inputs = {values.tensor for values in event.inputs}
        at = number + 1
        for later in range(number + 1, len(events)):
            other = events[later]
            if isinstance(other, Stepped) or other.step != event.step:
                break
            if isinstance(other, Copied) and other.direction == "in" and other.tensor in inputs:
                at = later + 1
        streams = {use.launch.stream for use in case.index.launches_of(event)}
        while at > number + 1 and at < len(events):
            other = events[at]
            is_before = isinstance(other, StreamEvent) and (
                other.action == "wait" or other.stream not in streams
            )
            if not is_before:
                break
            at += 1
        begins.setdefault(at, []).append(event)
    return begins


def _stream_event(clocks: Clocks, event: StreamEvent) -> Iterator[_Disorder]:
    if event.action == "record":
        clocks.record(event.event, event.stream)
    elif event.action == "synchronise":
        clocks.host_waits(event.stream or None)
    elif event.action == "wait" and not clocks.wait(event.event, event.stream):
        touch = _Touch(
            f"the wait for event {event.event}",
            event.stream,
            0,
            event.seq,
            False,
            argument=f"event {event.event}",
            site=event.site,
        )
        yield _Disorder(
            Cause.LOST_EVENT,
            touch,
            touch,
            f"stream {event.stream or 'default'} waits for event {event.event} (at {event.site}), "
            "which was never recorded before",
        )


def _rewritten(
    clocks: Clocks, event: HostWrote, pinned: list[tuple[int, int, _Touch]]
) -> Iterator[_Disorder]:
    end = event.host_address + event.num_bytes
    for address, num_bytes, copy in pinned:
        if (
            address < end
            and event.host_address < address + num_bytes
            and not clocks.is_before(copy.stream, copy.tick, HOST)
        ):
            write = _Touch(
                "the host's write",
                HOST,
                0,
                event.seq,
                True,
                argument=copy.argument,
                site=event.site,
                tensor=copy.tensor,
            )
            yield _Disorder(
                Cause.REWRITTEN_IN_FLIGHT,
                copy,
                write,
                f"the host wrote {event.num_bytes} bytes of the pinned buffer at "
                f"{event.host_address:#x} (event {event.seq}, {event.site}) while {copy.what} "
                f"(event {copy.seq}, {copy.site}) was not known to have ended: nobody had waited",
            )


def _against(
    clocks: Clocks, touch: _Touch, tensors: dict[int, list[_Touch]]
) -> Iterator[_Disorder]:
    before = tensors.setdefault(touch.tensor, [])
    for other in before:
        if (
            (other.is_write or touch.is_write)
            and other.stream != touch.stream
            and not clocks.is_before(other.stream, other.tick, touch.stream)
        ):
            verb = "writes" if other.is_write else "reads"
            yield _Disorder(
                Cause.MISSING_WAIT,
                other,
                touch,
                f"{touch.what} in stream {touch.stream or 'default'} (event {touch.seq}) uses what "
                f"{other.what} in stream {other.stream or 'default'} (event {other.seq}) {verb}, "
                "and nothing orders the two: no event is recorded after the one and waited for "
                "before the other",
            )
    if touch.is_write:
        before[:] = [earlier for earlier in before if earlier.stream != touch.stream]
    same = (touch.stream, touch.is_write)
    before[:] = [earlier for earlier in before if (earlier.stream, earlier.is_write) != same]
    before.append(touch)


def _copy_touches(case: Case, event: Copied, clocks: Clocks) -> Iterator[_Touch]:
    tick = clocks.tick(event.stream)
    tensor = case.tensors.get(event.tensor) if event.tensor is not None else None
    if tensor is not None:
        way = "to the host" if event.direction == "out" else "to the device"
        yield _Touch(
            f"the copy of {tensor.name} {way}",
            event.stream,
            tick,
            event.seq,
            event.direction == "in",
            argument=tensor.name,
            site=event.site,
            tensor=tensor.allocation,
        )


def _launch_touches(case: Case, event: Stepped | Launched, clocks: Clocks) -> Iterator[_Touch]:
    uses = case.index.launches_of(event)
    streams = {use.launch.stream for use in uses}
    ticks = {stream: clocks.tick(stream) for stream in streams}
    for use in uses:
        written = case.written_by(use.launch)
        for name, tensor in case.tensors_of(use.launch).items():
            stream = use.launch.stream
            yield _Touch(
                f"{use.launch.kernel} ({name})",
                stream,
                ticks[stream],
                event.seq,
                name in written,
                use.launch,
                name,
                use.place,
                use.launch.site,
                tensor.allocation,
            )


def _tensor_name(case: Case, number: int | None) -> str:
    tensor = case.tensors.get(number) if number is not None else None
    return tensor.name if tensor else "a tensor"


# -- claims ---------------------------------------------------------------------------------------


def _claim(case: Case, events: Sequence[AnyEvent], disorder: _Disorder) -> Claim:
    left = [
        other
        for other in _disorder(case, events, frozenset({disorder.second.seq}))
        if other.cause is disorder.cause and other.second.seq == disorder.second.seq
    ]
    second, first = disorder.second, disorder.first
    launch = second.launch or first.launch
    argument = second.argument if second.launch or not first.launch else first.argument
    fix = {
        Cause.MISSING_WAIT: f"Record an event after {first.what}"
        f"{f' ({first.site})' if first.site else ''} and wait for it in stream "
        f"{second.stream or 'default'} before {second.what}",
        Cause.REWRITTEN_IN_FLIGHT: f"Wait for the copy (an event behind it) before the buffer is "
        f"written again at {second.site}, or take another buffer",
        Cause.LOST_EVENT: f"Record {argument} before it is waited for at {second.site}",
    }[disorder.cause]
    corrected = {
        Cause.MISSING_WAIT: f"a wait before event {second.seq}",
        Cause.REWRITTEN_IN_FLIGHT: f"a wait before event {second.seq}",
        Cause.LOST_EVENT: f"{argument} recorded before event {second.seq}",
    }[disorder.cause]
    green = f"with {corrected} {len(left)} pairs there are without order"
    if disorder.cause is Cause.LOST_EVENT:
        green = f"with {corrected} the wait has what it waits for, as every other wait of the run"
    access = case.access(launch, argument) if launch else None
    tensors = tuple(t.id for t in case.tensors.values() if t.allocation == second.tensor)
    if disorder.cause is Cause.REWRITTEN_IN_FLIGHT:
        tensors = (second.tensor,)
        launch = launch or _reader(case, second.tensor)
    root = RootCause(
        cause=disorder.cause,
        sentence=disorder.text,
        fix=fix,
        proof=Proof(disorder.text, corrected, green),
        kernel=launch.kernel if launch else None,
        argument=_argument(case, launch, second.tensor) or argument,
        tensor=argument,
        place=second.place or first.place,
    ).at(access)
    return proven(root, NAME, (), _WOULD_REFUTE[disorder.cause], second.seq, tensors)


def _reader(case: Case, tensor: int) -> LaunchRecord | None:
    """The first launch that takes a tensor."""
    for use in case.launches:
        if any(fact.tensor == tensor for fact in (*use.launch.facts, *use.launch.arguments)):
            return use.launch
    return None


def _argument(case: Case, launch: LaunchRecord | None, tensor: int) -> str | None:
    for fact in launch.facts if launch else ():
        if fact.tensor == tensor:
            return fact.name
    return None
