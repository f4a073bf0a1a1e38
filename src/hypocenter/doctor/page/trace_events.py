"""The timeline as trace events, which ui.perfetto.dev and chrome://tracing show.

The format is Google's "Trace Event Format". A run has no clock, so each thing that the host did
takes one microsecond here, in its order.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import msgspec

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.page.timeline import Kind, Moment, moments
from hypocenter.record.bundle import Bundle

#: The newest moments that are written: a viewer takes this many within seconds.
MAX_MOMENTS = 200_000
_PROCESS, _STEPS, _MEMORY, _COPIES, _HOST, _FIRST_STREAM = 1, 1, 2, 3, 4, 5
_TRACKS = {_STEPS: "steps", _MEMORY: "memory", _COPIES: "copies", _HOST: "host"}
_TRACK_OF = {
    Kind.STEP: _STEPS,
    Kind.ALLOCATION: _MEMORY,
    Kind.FREE: _MEMORY,
    Kind.COPY: _COPIES,
}


def trace_json(bundle: Bundle, diagnosis: Diagnosis) -> bytes:
    """The trace of a run with its fault, and a mark at each launch that is proven to be wrong."""
    case = Case(bundle)
    kept: collections.deque[Moment] = collections.deque(maxlen=MAX_MOMENTS)
    num = 0
    for moment in moments(case):
        num += 1
        kept.append(moment)
    streams: dict[str, int] = {}
    events = [*_events(case, diagnosis, kept, streams)]
    about = {
        "time": "one microsecond is one thing that the host did; a run has no clock",
        "left_out": f"{count_text(num - len(kept), 'older event')}",
        "symptom": diagnosis.symptom,
    }
    trace = {
        "traceEvents": [*_names(diagnosis, streams), *events],
        "displayTimeUnit": "ns",
        "otherData": about,
    }
    return msgspec.json.encode(trace)


def _names(diagnosis: Diagnosis, streams: dict[str, int]) -> Iterator[dict[str, Any]]:
    """What the viewer calls the process and its tracks, and their order."""
    command = diagnosis.environment.command or "a run"
    yield _about("process_name", 0, {"name": f"{command} (1 us is one event)"})
    launches = {track: f"launches, stream {name or 'default'}" for name, track in streams.items()}
    for track, name in (_TRACKS | launches).items():
        yield _about("thread_name", track, {"name": name})
        yield _about("thread_sort_index", track, {"sort_index": track})


def _about(name: str, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PROCESS, "tid": track, "args": args}


def _events(
    case: Case,
    diagnosis: Diagnosis,
    kept: collections.deque[Moment],
    streams: dict[str, int],
) -> Iterator[dict[str, Any]]:
    causes = {root.place: str(root.cause) for root in diagnosis.roots if root.place is not None}
    ends = _ends_of_steps(kept)
    num_bytes = 0
    for time, moment in enumerate(kept):
        track = _TRACK_OF.get(moment.kind, _HOST)
        if moment.kind is Kind.LAUNCH:
            track = streams.setdefault(moment.stream, _FIRST_STREAM + len(streams))
        event: dict[str, Any] = {
            "name": _name(moment),
            "cat": str(moment.kind),
            "ph": "X",
            "ts": time,
            "dur": ends.get(time, time + 1) - time,
            "pid": _PROCESS,
            "tid": track,
            "args": _args(moment),
        }
        if moment.kind is Kind.FAULT:
            event |= {"ph": "i", "s": "g"}
            del event["dur"]
        yield event
        if (size := _size(case, moment)) is not None:
            num_bytes += size if moment.kind is Kind.ALLOCATION else -size
            yield {
                "name": "memory that lives",
                "ph": "C",
                "ts": time,
                "pid": _PROCESS,
                "args": {"bytes": max(0, num_bytes)},
            }
        if moment.place in causes:
            yield event | {
                "name": f"proven: {causes[moment.place]}",
                "cat": "cause",
                "ph": "i",
                "s": "t",
            }


def _ends_of_steps(kept: collections.deque[Moment]) -> dict[int, int]:
    """For the time of each step the time at which its last launch ends."""
    ends: dict[int, int] = {}
    begun: tuple[int, int] | None = None
    for time, moment in enumerate(kept):
        if moment.kind is Kind.STEP:
            begun = time, moment.seq
        elif begun is not None and moment.kind is Kind.LAUNCH and moment.seq == begun[1]:
            ends[begun[0]] = time + 1
    return ends


def _name(moment: Moment) -> str:
    if moment.kind is Kind.STEP:
        return f"step {moment.step}: {moment.name}"
    if moment.kind in (Kind.LAUNCH, Kind.COPY, Kind.FAULT):
        return moment.name
    return f"{moment.kind}: {moment.name}"


def _args(moment: Moment) -> dict[str, Any]:
    told = {"step": moment.step, "number": moment.seq, "told": moment.text, "site": moment.site}
    told |= {"launch": moment.place.launch} if moment.place is not None else {}
    told |= {"may_have_been_under_way": True} if moment.is_under_way else {}
    return {name: value for name, value in told.items() if value != ""} | moment.facts


def _size(case: Case, moment: Moment) -> int | None:
    """Bytes that a moment makes or frees on the device."""
    if moment.kind not in (Kind.ALLOCATION, Kind.FREE) or moment.allocation is None:
        return None
    memory = case.allocations.get(moment.allocation)
    return memory.num_bytes if memory is not None and memory.kind == "device" else None
