"""Rung: a kernel that works in place, and whose autotuner ran it on its own results.

With `--suspect` the record has what small tensors held before the first trial and when the launch
itself began. The launch is replayed with both: where the results differ, tuning has changed them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Edit, Proof, RootCause, Verdict, proven, row
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.contents import LaunchOutcome
from hypocenter.record.events import Tuned, Values
from hypocenter.replay.findings import ChangedResult

if TYPE_CHECKING:
    from hypocenter.replay.written import Written

NAME = "tuned in place"
#: Seconds of one replay; each tuned kernel takes three.
REPLAY_SECONDS = 2.0
#: Tuned launches that are looked at.
MAX_TUNED = 8


@dataclass(frozen=True, slots=True)
class _TunedLaunch:
    """A launch, and the first trial before it of the same kernel on the same tensors."""

    use: LaunchMade
    launch: LaunchOutcome
    trial: LaunchOutcome
    tuned: Tuned
    num_trials: int


def tuned_in_place(case: Case) -> list[Claim]:
    """A root for each kernel of which tuning has changed a result."""
    if not any(isinstance(event, Tuned) for event in case.index.events):
        return []
    claims: list[Claim] = []
    num_same = 0
    seen: set[str] = set()
    for tuned in list(_tuned_launches(case))[:MAX_TUNED]:
        if tuned.use.launch.source in seen:
            continue
        try:
            claim = _claim(case, tuned)
        except (HypoError, MissingPackage, ImportError):  # the replay's own rung has told why
            continue
        if claim is None:
            num_same += 1
        else:
            seen.add(tuned.use.launch.source)
            claims.append(claim)
    if num_same and not claims:
        claims.append(
            row(
                Cause.TUNED_IN_PLACE,
                Verdict.REFUTED,
                NAME,
                "tuned kernels give what they give with the tensors as they were before tuning",
                would_refute="a result that its own trials have changed",
            )
        )
    return claims


def _tuned_launches(case: Case) -> Iterator[_TunedLaunch]:
    """Launches behind trials on their own tensors, where both were recorded with all they held."""
    outcomes = {outcome.launch: outcome for outcome in case.bundle.outcomes}
    trials: dict[str, list[tuple[Tuned, LaunchMade]]] = {}
    spans = [event for event in case.index.events if isinstance(event, Tuned)]
    for use in case.launches:
        span = next((s for s in spans if s.began < use.seq < s.seq), None)
        if span is not None and span.kernel == use.launch.function:
            trials.setdefault(use.launch.source, []).append((span, use))
            continue
        before = trials.pop(use.launch.source, [])
        if not before or use.seq not in outcomes:
            continue
        tuned, first = before[0]
        if first.seq in outcomes and _tensors(first) == _tensors(use):
            yield _TunedLaunch(use, outcomes[use.seq], outcomes[first.seq], tuned, len(before))


def _tensors(use: LaunchMade) -> dict[str, int | None]:
    return {a.name: a.tensor for a in use.launch.arguments if a.tensor is not None}


# -- what tuning has changed ----------------------------------------------------------------------


def _claim(case: Case, tuned: _TunedLaunch) -> Claim | None:
    """None where the launch gives the same with what its tensors held before.

    A list of names can put back only what the launch changes; that is tried as well.
    """
    from hypocenter.replay.written import written_with

    def write_with(held: Mapping[int, Values]) -> Mapping[str, Written]:
        outcome = msgspec.structs.replace(tuned.launch, given=tuple(held.values()))
        seconds = min(REPLAY_SECONDS, case.limit.left)
        return written_with(
            case.bundle, outcome, allow_source=case.allow_source, budget_seconds=seconds
        )

    now = {values.tensor: values for values in tuned.launch.given}
    before = {values.tensor: values for values in tuned.trial.given}
    if now.keys() != before.keys():
        return None
    given = _tensors(tuned.use)
    names = [n for n, t in given.items() if t and now[t].data != before[t].data]
    if not names:
        return None
    alone, again = write_with(before), write_with(now)
    names = [name for name in names if name in again]
    restored = write_with(now | {t: before[t] for n, t in given.items() if t and n in names})
    first = next((name for name in names if _differs(alone, again, name)), None)
    if first is None or any(_differs(alone, restored, name) for name in alone):
        return None
    at = tuple(int(i) for i in np.argwhere(alone[first].differs(again[first]))[0])
    were_zero = not any(any(before[t].data) for n, t in given.items() if t and n in names)
    numbers = alone[first].number(at), again[first].number(at)
    return _proven(tuned, ChangedResult(first, at, *numbers, were_zero), names)


def _differs(one: Mapping[str, Written], other: Mapping[str, Written], name: str) -> bool:
    is_there = name in one and name in other
    return is_there and bool(one[name].differs(other[name]).any())


def _proven(tuned: _TunedLaunch, changed: ChangedResult, names: Sequence[str]) -> Claim:
    use, event = tuned.use, tuned.tuned
    trials = count_text(tuned.num_trials, "trial")
    listed = ", ".join(f'"{name}"' for name in names)
    given = f"{changed.option}=[{listed}]"
    text = changed.text(f"{trials} and the launch")
    was = "zeros" if changed.was_zero else "what they held"
    root = RootCause(
        cause=Cause.TUNED_IN_PLACE,
        sentence=f"{use.launch.kernel}: {text}",
        fix=f"Pass {given} to triton.autotune",
        proof=Proof(
            f"the replay of {use.where} with what its tensors held when it began: {text}",
            f"{', '.join(names)} put back to {was} before the first trial",
            f"the launch gives what it gives alone: {changed.argument}"
            f"[{', '.join(map(str, changed.index))}] is {changed.alone:g}",
        ),
        kernel=use.launch.kernel,
        argument=changed.argument,
        file=event.file or None,
        line=event.line or None,
        expression=event.text.partition("\n")[0].strip() or None,
        place=use.place,
        edits=_edits(event, changed.option, listed),
    )
    return proven(
        root,
        NAME,
        (f"{trials} of {use.launch.kernel} ran on these tensors before {use.where}",),
        "the same result with the tensors as they were before tuning",
        use.seq,
        tuple(tensor for tensor in _tensors(use).values() if tensor),
    )


def _edits(tuned: Tuned, option: str, listed: str) -> tuple[Edit, ...]:
    """The option put before the last keyword of a decorator that has none of that name."""
    try:
        tree = ast.parse(f"{tuned.text}\ndef kernel(): ...").body[0]
    except SyntaxError:  # it was too long to be kept whole
        return ()
    tuner = tree.decorator_list[0] if isinstance(tree, ast.FunctionDef) else None
    if not isinstance(tuner, ast.Call) or not tuner.keywords:
        return ()
    if option in {keyword.arg for keyword in tuner.keywords}:
        return ()
    last = tuner.keywords[-1]
    old = tuned.text.splitlines()[last.lineno - 1].encode()
    new = old[: last.col_offset] + f"{option}=[{listed}], ".encode() + old[last.col_offset :]
    line = tuned.line + last.lineno - 1
    return (Edit(file=tuned.file, line=line, old=old.decode().strip(), new=new.decode().strip()),)
