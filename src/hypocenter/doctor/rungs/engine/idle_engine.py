"""An engine that goes round and runs nothing, though requests of it are open: of the hang's rung.

Where a thread stood is read in what Python itself wrote when the command was ended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, proven
from hypocenter.record.engine_events import Answered, BlocksNamed, Entered
from hypocenter.record.raised import statement_at

#: A frame as faulthandler writes it, the innermost first.
_FRAME = re.compile(r'^  File "([^"\n]{1,4096})", line (\d{1,9}) in ([^\n]{1,200})$', re.M)
#: Frames of the engine lie in this folder of the package; its steps in this function of it, which
#: these call over and over.
_FOLDER, _STEP, _DRIVES = "/hypocenter/engine/", "_step", ("complete", "follow")
#: What else stands between these, and waits for nobody.
_BETWEEN = ("/contextlib.py", "/hypocenter/record/recorder.py")
#: Where the engine waits: for another thread that steps, for a lock, for another process.
_WAITS = re.compile(
    r"with self\.\w*lock\b(?!\()|with self\._turn_ended|\.(acquire|wait_for|flock)\("
)
_MAX_FRAMES = 8


@dataclass(frozen=True, slots=True)
class _Frame:
    file: str
    line: int
    function: str


def idle_engine(case: Case, rung: str) -> Claim | None:
    """What a thread did that steps and runs nothing; None where none does.

    A thread that waits for something stands in code of others, and is none of these.
    """
    entered = {event.request: event for event in case.index.events_of(Entered)}
    ended = {event.request for event in case.index.events_of(Answered)}
    waiting = sorted(entered.keys() - ended)
    frames = _frames(case.bundle.fault.stack)
    at = _decides(frames)
    if not waiting or (at is None and not _is_beginning(frames)):
        return None
    ran = {request.id for event in case.steps for request in event.requests}
    never = [number for number in waiting if number not in ran]
    num_steps = sum(bool(event.requests) for event in case.steps)
    text = statement_at(at.file, at.line) if at is not None else None
    who = count_text(len(waiting), "request")
    left = f"{who} that had entered ({len(never)} of which never ran) wait for a step"
    stood = f"in {at.function}: `{text}`" if at is not None else "about to make the next step"
    place = f"at {at.file}:{at.line}" if at is not None else "at its beginning"
    decides = at.function if at is not None else "the scheduler"
    whole = [told for number in never if (told := _all_found(case, entered[number]))]
    fix = f"Let each step run a token of one request that waits: see what {decides} decides"
    if whole:
        left = f"{left}; {'; '.join(whole[:_MAX_FRAMES])}"
        fix = "Leave the last token of a prompt to be run: its logits give the first of the answer"
    root = RootCause(
        cause=Cause.ENDLESS_LOOP,
        blames=Blame.KERNEL,
        sentence=f"the engine goes round and runs nothing: {left}, and the thread that steps was "
        f"{stood}",
        fix=fix,
        proof=Proof(
            f"{left}; none began until the command was ended, and a thread stood within a step "
            f"{place}, which waits for nobody",
            "a step with a token of one of them",
            f"{count_text(num_steps, 'step')} before had such a token, and ended",
        ),
        file=at.file if at is not None else None,
        line=at.line if at is not None else None,
        expression=text,
    )
    stack = [f"{frame.function} ({frame.file}:{frame.line})" for frame in frames[:_MAX_FRAMES]]
    last = max((event.seq for event in case.bundle.events), default=0)
    return proven(root, rung, ("; called from ".join(stack),), "a step that begins", last)


def _decides(frames: list[_Frame]) -> _Frame | None:
    """What a step had called, where all that it stands in is the engine's: that decides what is
    run, and what stands deeper down does so by chance."""
    steps = [at for at, frame in enumerate(frames) if frame.function == _STEP]
    within = frames[: steps[0] + 1] if steps else []
    if not within or not all(_is_engines(frame) and _goes_on(frame) for frame in within):
        return None
    return frames[max(steps[0] - 1, 0)]


def _is_beginning(frames: list[_Frame]) -> bool:
    """Whether the thread goes from step to step, and what it stands in waits for nobody."""
    drives = [at for at, frame in enumerate(frames) if frame.function in _DRIVES]
    within = frames[: drives[0] + 1] if drives else []
    if (
        not within
        or not _is_engines(within[-1])
        or any(frame.function == _STEP for frame in within)
    ):
        return False
    return all(map(_goes_on, within))


def _goes_on(frame: _Frame) -> bool:
    if not _is_engines(frame):
        return _path(frame).endswith(_BETWEEN)
    return not _WAITS.search(statement_at(frame.file, frame.line))


def _all_found(case: Case, entered: Entered) -> str | None:
    """That all tokens of a request that never ran are in blocks that it found in the cache."""
    pages = [t for t in case.bundle.tensors if t.owner == "kv_cache" and t.name.startswith("k")]
    named = [
        event.first + len(event.blocks)
        for event in case.index.events_of(BlocksNamed)
        if event.request == entered.request
    ]
    num_tokens = max(named, default=0) * (pages[0].shape[-1] if pages else 0)
    if not num_tokens or num_tokens < entered.num_prompt_tokens:
        return None
    return (
        f"all {entered.num_prompt_tokens} tokens of request {entered.request} were found in "
        f"{count_text(max(named), 'kept block')}, so none is left to be run"
    )


def _frames(stack: str) -> list[_Frame]:
    """Those of the thread that is told of first: where there are several, that which was ended."""
    thread = re.split(r"^(?:Current thread|Thread) 0x", stack, flags=re.M)[1:2]
    found = _FRAME.finditer(thread[0].partition("\n\n")[0]) if thread else ()
    return [_Frame(match[1], int(match[2]), match[3]) for match in found]


def _is_engines(frame: _Frame) -> bool:
    return _FOLDER in _path(frame)


def _path(frame: _Frame) -> str:
    return frame.file.replace("\\", "/")
