"""A line of the engine's own Python that is all in which this run differs from the good one.

No rung of its own: `good_run.py` asks where nothing nearer to the device tells it. The good run is
the test, a run with the line as it was.
"""

from __future__ import annotations

from hypocenter.base.wording import count_text
from hypocenter.doctor.beside.host_text import HostChange
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.culprit import changed_line
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.record.bundle_index import LaunchMade

#: Of changes of which no test tells which one it is so many are told.
_MAX_TOLD = 6
#: Behind all events: what has a place tells more than that the whole run differs.
_NOWHERE = 1 << 62


def of_changed_line(
    case: Case, rung: str, red: str, green: str, use: LaunchMade | None, argument: str | None
) -> Claim | None:
    """The line, where there is one alone; `use` is the launch that first showed it, if one did.

    `red` says what was seen in this run, `green` what in the good one.
    """
    change = case.host.only
    if change is None or changed_line(case) is None:
        return None
    line, kernel = change.lines[0], use.launch.kernel if use is not None else None
    tensor = case.tensor_of(use.launch, argument) if use is not None and argument else None
    is_answer = case.kind in ("none", "differs", "nonfinite")
    root = RootCause(
        cause=Cause.WRONG_ANSWER if is_answer else Cause.CHANGED_LINE,
        blames=Blame.UNKNOWN,
        sentence=f"{f'{kernel}: ' if kernel else ''}{red}; of all that was recorded of code and "
        f"settings one thing is not as in the good run: {change.text} in "
        f"{line.function or line.file}",
        fix=_fix(change),
        proof=Proof(red, f"the good run's text: {line.was or 'without that line'}", green),
        kernel=kernel,
        argument=argument,
        tensor=tensor.name if tensor is not None else None,
        file=change.place.rpartition(":")[0],
        line=line.line,
        expression=line.text,
        place=use.place if use is not None else None,
    )
    seq = use.seq if use is not None else _NOWHERE
    return proven(root, rung, (), "the same end of a run with the good run's text", seq)


def _fix(change: HostChange) -> str:
    first, more = change.lines[0], len(change.lines) - 1
    if not first.was:
        return f"Take the line out: {first.text}"
    return f"Put the line back: {first.was}" + (f", and {more} more beside it" if more else "")


def open_changes(case: Case) -> tuple[str, ...]:
    """Evidence: which lines of the engine's own Python are not as in the good run."""
    told = [f"changed since the good run: {c.place}: {c.text}" for c in case.host.changes]
    if len(told) > _MAX_TOLD:
        left = count_text(len(told) - _MAX_TOLD, "change")
        told[_MAX_TOLD:] = [f"{left} more of the engine's own Python"]
    return tuple(told)


def other_text(case: Case, rung: str) -> Claim:
    """All requests have the tokens of the good run, and one has another text."""
    text = "a request was told another text, or other calls, than in the good run"
    return _of_equal_tokens(case, rung, text, "every request with the same tokens, and the text")


def failed_behind(case: Case, rung: str) -> Claim:
    """All steps are those of the good run, and a request failed that has its answer there."""
    text = "a request ended with an error, and not in the good run"
    return _of_equal_tokens(case, rung, text, "every request with the same tokens, and its answer")


def _of_equal_tokens(case: Case, rung: str, text: str, green: str) -> Claim:
    return of_changed_line(case, rung, text, green, None, None) or row(
        Cause.WRONG_ANSWER,
        Verdict.INCONCLUSIVE,
        rung,
        f"{text}, though its tokens are the same",
        *open_changes(case),
        would_refute="equal ends of requests with the same tokens",
    )


def other_prompt(case: Case, rung: str, difference: str) -> Claim:
    """Both runs were asked the same, and made other tokens of it."""
    text = "the same texts and conversations were made other tokens than in the good run: "
    text += difference
    found = of_changed_line(case, rung, text, "the same texts, and the tokens of then", None, None)
    return found or row(
        Cause.WRONG_ANSWER,
        Verdict.INCONCLUSIVE,
        rung,
        text,
        *open_changes(case),
        would_refute="equal tokens for equal texts",
    )
