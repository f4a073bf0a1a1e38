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
from hypocenter.record.engine_events import Answered, Entered
from hypocenter.record.raised import statement_at

#: A frame as faulthandler writes it, the innermost first.
_FRAME = re.compile(r'^  File "([^"\n]{1,4096})", line (\d{1,9}) in ([^\n]{1,200})$', re.M)
#: Frames of the engine lie in this folder of the package; its steps in this function of it.
_FOLDER, _STEP = "/hypocenter/engine/", "_step"
_MAX_FRAMES = 8


@dataclass(frozen=True, slots=True)
class _Frame:
    file: str
    line: int
    function: str


def idle_engine(case: Case, rung: str) -> Claim | None:
    """The statement at which a thread stood that steps and runs nothing; None where none does.

    A thread that waits for something stands in code of others, and is none of these.
    """
    entered = {event.request for event in case.index.events_of(Entered)}
    waiting = sorted(entered - {event.request for event in case.index.events_of(Answered)})
    frames = _frames(case.bundle.fault.stack)
    steps = [at for at, frame in enumerate(frames) if frame.function == _STEP]
    if not waiting or not steps or not all(map(_is_engines, frames[: steps[0] + 1])):
        return None
    ran = {request.id for event in case.steps for request in event.requests}
    never = [number for number in waiting if number not in ran]
    # What it stood in deeper down is by chance; what its step had called decides what is run.
    at = frames[max(steps[0] - 1, 0)]
    num_steps = sum(bool(event.requests) for event in case.steps)
    text = statement_at(at.file, at.line)
    who = count_text(len(waiting), "request")
    left = f"{who} that had entered ({len(never)} of which never ran) wait for a step"
    root = RootCause(
        cause=Cause.ENDLESS_LOOP,
        blames=Blame.KERNEL,
        sentence=f"the engine goes round and runs nothing: {left}, and the thread that steps was "
        f"in {at.function}: `{text}`",
        fix="Let each step run a token of one request that waits, or end one with an error: see "
        f"what {at.function} decides",
        proof=Proof(
            f"{left}; none began until the command was ended, and a thread stood within a step at "
            f"{at.file}:{at.line}, which waits for nobody",
            "a step with a token of one of them",
            f"{count_text(num_steps, 'step')} before had such a token, and ended",
        ),
        file=at.file,
        line=at.line,
        expression=text,
    )
    stack = [f"{frame.function} ({frame.file}:{frame.line})" for frame in frames[:_MAX_FRAMES]]
    last = max((event.seq for event in case.bundle.events), default=0)
    return proven(root, rung, ("; called from ".join(stack),), "a step that begins", last)


def _frames(stack: str) -> list[_Frame]:
    """Those of the thread that is told of first: where there are several, that which was ended."""
    thread = re.split(r"^(?:Current thread|Thread) 0x", stack, flags=re.M)[1:2]
    found = _FRAME.finditer(thread[0].partition("\n\n")[0]) if thread else ()
    return [_Frame(match[1], int(match[2]), match[3]) for match in found]


def _is_engines(frame: _Frame) -> bool:
    return _FOLDER in frame.file.replace("\\", "/")
