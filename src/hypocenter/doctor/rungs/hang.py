"""Rung: a step that did not end: what had ended, what had not, and which of it has a loop."""

from __future__ import annotations

import contextlib
import re

from hypocenter.base.errors import ErrorKind, HypoError, MissingPackage
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.gpu_sight import sight_text
from hypocenter.doctor.installed_text import changes, installed_texts
from hypocenter.doctor.kernel_text import has_loop, line_text
from hypocenter.doctor.rungs.engine.idle_engine import idle_engine
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import SourceRecord
from hypocenter.replay.terms import KernelText, Schedule

NAME = "hang"
#: A program is given twice the budget of its replay.
_PROGRAM_SECONDS = 2.0
_MAX_REPLAYS = 4


def hang(case: Case) -> list[Claim]:
    """The launch under way at the end, and whether it ends when it is replayed."""
    fault = case.bundle.fault
    if fault.kind != "hang" and fault.error_kind is not ErrorKind.ENDLESS:
        return []
    looping = [(use, source) for use in _last_of_each(case) if (source := _looping(case, use))]
    if not looping:
        # On a CPU a launch has ended when the thread that made it stands anywhere else.
        is_elsewhere = all(use.launch.device == "cpu" for use in case.index.under_way)
        if is_elsewhere and (idle := idle_engine(case, NAME)) is not None:
            return [idle]
        kernels = dict.fromkeys(use.launch.kernel for use in case.index.under_way)
        names = ", ".join(kernels) or "no launch"
        return [
            row(
                Cause.ENDLESS_LOOP,
                Verdict.REFUTED,
                NAME,
                f"under way were {names}; none of them has a loop without a bound",
                would_refute="a `while` in one of them",
            )
        ]
    claims = []
    for use, source in looping[:_MAX_REPLAYS]:
        claims.append(_replay(case, use, source))
        if claims[-1].root is not None:
            break
    return claims


def _last_of_each(case: Case) -> list[LaunchMade]:
    """Of each kernel under way the last launch, in the order of the step."""
    under_way = case.index.under_way
    return list({(use.launch.source, use.launch.grid): use for use in under_way}.values())


def _looping(case: Case, use: LaunchMade) -> SourceRecord | None:
    """The kernel, or a function that it calls, with a `while`."""
    source = case.sources.get(use.launch.source)
    if source is None:
        return None
    callees = (case.sources[key] for key in source.callees if key in case.sources)
    return next((text for text in (source, *callees) if has_loop(text) is not None), None)


def _replay(case: Case, use: LaunchMade, source: SourceRecord) -> Claim:
    line = has_loop(source) or source.first_line
    text = line_text(source, line)
    where = f"{use.where}: {use.launch.kernel} has a loop that ends on a condition: `{text}`"
    try:
        from hypocenter.replay.findings import FindingKind
        from hypocenter.replay.recorded import replay_place
        from hypocenter.replay.replay import ProgramNeverEnds
    except (MissingPackage, ImportError) as error:
        return row(
            Cause.ENDLESS_LOOP,
            Verdict.INCONCLUSIVE,
            NAME,
            where,
            f"whether it ends is for the replay to say: {error}",
            would_refute="a replay that ends",
            kernel=use.launch.kernel,
        )
    assert use.place is not None
    try:
        report = replay_place(
            case.index,
            use.place,
            text=KernelText(case.allow_source),
            schedule=Schedule(budget_seconds=_PROGRAM_SECONDS),
        )
    except ProgramNeverEnds as error:
        return _endless(case, use, source, line, text, str(error))
    except HypoError as error:
        return row(
            Cause.ENDLESS_LOOP,
            Verdict.INCONCLUSIVE,
            NAME,
            where,
            str(error),
            would_refute="a replay that ends",
            kernel=use.launch.kernel,
        )
    waits = [f.detail for f in report.findings if f.kind == FindingKind.WAITS_FOR_EVER]
    if waits:
        return _endless(case, use, source, line, text, waits[0])
    if told := _seen_there(case, use):
        return row(
            Cause.ENDLESS_LOOP,
            Verdict.CONFIRMED,
            NAME,
            where,
            told,
            "its replay with the recorded arguments ends, so it waits for what was not recorded",
            would_refute="a dump in which it stands elsewhere",
            kernel=use.launch.kernel,
        )
    if use.launch.device == "interpreter":
        return row(
            Cause.ENDLESS_LOOP,
            Verdict.INCONCLUSIVE,
            NAME,
            f"{where}; its replay, in which programs that wait take turns, ends",
            "Triton's interpreter runs each program to its end before the next begins, so one that "
            "waits for a later one never ends there; a GPU may run both at once",
            would_refute="a run of it on a GPU that ends",
            kernel=use.launch.kernel,
        )
    return row(
        Cause.ENDLESS_LOOP,
        Verdict.REFUTED,
        NAME,
        f"{where}; its replay with the recorded arguments ends",
        would_refute="a replay that does not end",
        kernel=use.launch.kernel,
    )


def _seen_there(case: Case, use: LaunchMade) -> str:
    """What a GPU's dump says of where the launch stood at the end; "" where there is none."""
    sights = (sight for sight in case.sights if sight.place == use.place and not sight.exception)
    return next(map(sight_text, sights), "")


def _endless(
    case: Case, use: LaunchMade, source: SourceRecord, line: int, text: str, told: str
) -> Claim:
    launch = use.launch
    corrected, green = _green(case, use)
    argument, loop_argument = _waits_for(case, use, source, line)
    root = RootCause(
        cause=Cause.ENDLESS_LOOP,
        sentence=f"{launch.kernel} does not end: `{text}` stays true",
        fix=f"Bound the loop `{text}`"
        + (f", or let a launch before it write {argument}" if argument else ""),
        proof=Proof(
            f"the replay of {use.where} is stuck in line {line}: {told}",
            corrected,
            green,
        ),
        kernel=launch.kernel,
        tensor=loop_argument,
        file=source.file,
        line=line,
        expression=text,
        place=use.place,
    )
    told = _seen_there(case, use)
    return proven(root, NAME, (told,) if told else (), "a replay that ends", use.seq)


def _green(case: Case, use: LaunchMade) -> tuple[str, str]:
    """The installed kernel in its place, where there is another; else what ran without it."""
    launch = use.launch
    if lines := changes(launch, case.sources, installed_texts()):
        from hypocenter.replay.recorded import replay_place

        assert use.place is not None
        fact = f"the kernel as it is installed (line {lines[0].line}: `{lines[0].was}`)"
        with contextlib.suppress(HypoError):
            done = replay_place(
                case.index,
                use.place,
                text=KernelText(is_installed=True),
                schedule=Schedule(budget_seconds=_PROGRAM_SECONDS),
            ).coverage
            return fact, (
                f"the same replay with {fact} ends: {done.num_run} of {done.num_launched} programs"
            )
    before = sum(
        other.launch.source == launch.source for other in case.launches if other.seq < use.seq
    )
    ended = f"; {before} launches of the same kernel had ended before it" if before else ""
    return "the launch left out", f"no other launch under way has a loop of that kind{ended}"


def _waits_for(
    case: Case, use: LaunchMade, source: SourceRecord, line: int
) -> tuple[str | None, str | None]:
    """The argument that the loop's own test reads, there or through a name."""
    for name, tensor in case.tensors_of(use.launch).items():
        access = case.access(use.launch, name)
        if access is None or access.function != source.function:
            continue
        at = line_text(source, access.line)
        made = at.partition("=")[0].strip()
        in_test = access.line == line or (
            line < access.line <= line + 6
            and made.isidentifier()
            and re.search(rf"\b{made}\b", line_text(source, line)) is not None
        )
        if in_test:
            return name, tensor.name
    return None, None
