"""A Diagnosis as text for a terminal, as Markdown and as JSON; decides nothing.

The first lines are what to do at three in the morning: cause, kernel, argument, line, fix.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import UNRECORDED, Diagnosis, Hypothesis, RootCause, Verdict
from hypocenter.record.events import Place
from hypocenter.record.gap import Gap, GapKind

_WIDTH = 100
#: Verdicts that are told in full on request.
_COUNTED = (Verdict.REFUTED, Verdict.NOT_TESTED)
#: Gaps whose `what` is a kernel.
_NOT_REPLAYED = (GapKind.NOT_REPLAYED, GapKind.SOURCE_NOT_RUN)
_LABEL = 11


@dataclass(frozen=True, slots=True)
class Origin:
    """What was diagnosed, as far as the command that replays it needs to know.

    `has_steps`: False for a program whose launches belong to no step; they count from 1 then.
    `needs_sources`: its kernels are not installed, so they run from the bundle's own text.
    """

    folder: str = "BUNDLE"
    has_steps: bool = True
    needs_sources: bool = False


def report_text(
    diagnosis: Diagnosis, origin: Origin | None = None, *, show_all: bool = False
) -> str:
    """The report in lines of at most 100 columns, but for paths.

    What is refuted and what was not tested are counted, and told with `show_all`.
    """
    return "\n".join(_text_lines(diagnosis, origin or Origin(), show_all)) + "\n"


def report_markdown(diagnosis: Diagnosis) -> str:
    return "\n".join(_markdown_lines(diagnosis)) + "\n"


def headline(diagnosis: Diagnosis) -> str:
    """One line: the first root cause, or that there is none."""
    if diagnosis.roots:
        root = diagnosis.roots[0]
        return f"{root.cause}{_of(root)}"
    confirmed = [
        hypothesis for hypothesis in diagnosis.hypotheses if hypothesis.verdict is Verdict.CONFIRMED
    ]
    if confirmed:
        causes = ", ".join(hypothesis.cause for hypothesis in confirmed)
        return f"no root cause is proven; confirmed: {causes}"
    if not diagnosis.has_symptom:
        if diagnosis.has_source_not_run:
            return "none found, but the kernels were not replayed"
        return "nothing found"
    return "no root cause is proven"


# -- text -----------------------------------------------------------------------------------------


def _text_lines(diagnosis: Diagnosis, origin: Origin, show_all: bool) -> Iterator[str]:
    if not diagnosis.roots:
        yield from _field("CAUSE", headline(diagnosis))
        for text in _what_would_help(diagnosis):
            yield from _field("", text)
    for number, root in enumerate(diagnosis.roots):
        if number:
            yield ""
            yield from _field("ALSO", "a second defect, with a proof of its own")
        yield from _root_text(root, origin)
    yield ""
    yield from _field("SYMPTOM", diagnosis.symptom)
    yield from _field("SURFACED", diagnosis.surfaced)
    for text in diagnosis.consequences:
        yield from _field("FOLLOWS", text)
    yield ""
    yield "HYPOTHESES"
    for verdict in Verdict:
        same = [hypothesis for hypothesis in diagnosis.hypotheses if hypothesis.verdict is verdict]
        if verdict in _COUNTED and not show_all:
            continue
        if verdict is Verdict.NOT_TESTED:
            yield from _untested_text(same)
        else:
            for hypothesis in same:
                yield from _hypothesis_text(hypothesis)
    if not show_all:
        yield from _wrap(_counts(diagnosis), "  ", "  ")
    if diagnosis.unseen:
        yield ""
        yield "NOT SEEN"
        for text in _by_reason(diagnosis.unseen):
            yield from _wrap(text, "  - ", "    ")
    yield ""
    yield from _field("RUNGS", _rungs(diagnosis))


def _what_would_help(diagnosis: Diagnosis) -> Iterator[str]:
    """What was not looked at and easily could be, where nothing was found."""
    if diagnosis.has_source_not_run:
        yield (
            "the program's own kernels were not replayed: their recorded source was not run; "
            "--run-sources runs it"
        )
    blind = [hypothesis for hypothesis in diagnosis.hypotheses if hypothesis.is_unrecorded]
    if diagnosis.is_clean and blind:
        yield f"not tested: {', '.join(hypothesis.cause for hypothesis in blind)}: {UNRECORDED}"
    wrong = [
        hypothesis for hypothesis in diagnosis.hypotheses if hypothesis.cause is Cause.WRONG_ANSWER
    ]
    if diagnosis.is_clean and any(hypothesis.verdict is Verdict.NOT_TESTED for hypothesis in wrong):
        yield (
            "a wrong answer shows only beside a run that is right, and none is given: add --good "
            "BUNDLE"
        )


def _counts(diagnosis: Diagnosis) -> str:
    """`21 causes refuted, 9 not tested (--all shows them)`."""
    refuted, untested = (
        len(
            {
                hypothesis.cause
                for hypothesis in diagnosis.hypotheses
                if hypothesis.verdict is verdict
            }
        )
        for verdict in _COUNTED
    )
    return (
        f"{refuted} {'cause' if refuted == 1 else 'causes'} refuted, {untested} not tested "
        "(--all shows them)"
    )


def _by_reason(unseen: Sequence[Gap]) -> Iterator[str]:
    """Kernels that were not replayed for one reason stand in one line."""
    kernels: dict[str, dict[str, None]] = {}
    for gap in unseen:
        if gap.kind in _NOT_REPLAYED:
            kernels.setdefault(gap.reason, {})[gap.what] = None
        else:
            yield str(gap)
    for reason, names in kernels.items():
        yield f"not replayed: {', '.join(names)}: {reason}"


def _root_text(root: RootCause, origin: Origin) -> Iterator[str]:
    yield from _field("CAUSE", f"{root.cause}{_of(root)}")
    yield from _field("", root.sentence)
    if root.file:
        yield f"{'LINE':<{_LABEL}}{root.file}:{root.line}"
        if root.expression:
            yield f"{'':<{_LABEL}}    {root.expression}"
    if root.place is not None:
        yield from _when(root.place, origin)
    yield from _field("FIX", root.fix)
    yield ""
    yield from _field("PROOF", f"red    {root.proof.red}", hang=7)
    yield from _field("", f"fact   {root.proof.corrected}", hang=7)
    yield from _field("", f"green  {root.proof.green}", hang=7)


def _when(place: Place, origin: Origin) -> Iterator[str]:
    if origin.has_steps:
        when = f"step {place.step}, launch {place.launch}"
        which = f"--step {place.step} --launch {place.launch}"
    else:
        when, which = f"launch {place.step}", f"--launch {place.step}"
    sources = " --run-sources" if origin.needs_sources else ""
    yield f"{'WHEN':<{_LABEL}}{when}"
    yield f"{'REPLAY':<{_LABEL}}hypo replay {shlex.quote(origin.folder)} {which}{sources}"


def _of(root: RootCause) -> str:
    named = f": argument {root.argument}" if root.argument else ""
    if root.argument and root.tensor and root.tensor != root.argument:
        named += f" (tensor {root.tensor})"
    return f"{named}{' of' if named else ':'} kernel {root.kernel}" if root.kernel else named


def _hypothesis_text(hypothesis: Hypothesis) -> Iterator[str]:
    where = ", ".join(filter(None, (hypothesis.kernel, hypothesis.argument)))
    named = f" ({where})" if where else ""
    by = f"  [{hypothesis.diagnostic}]" if hypothesis.diagnostic else ""
    yield f"  {hypothesis.verdict:<13}{hypothesis.cause}{named}{by}"
    for text in hypothesis.evidence:
        yield from _wrap(text, " " * 15, " " * 17)
    if hypothesis.would_refute and hypothesis.verdict is not Verdict.REFUTED:
        yield from _wrap(f"would refute it: {hypothesis.would_refute}", " " * 15, " " * 17)


def _untested_text(same: list[Hypothesis]) -> Iterator[str]:
    """Those with the same reason together: there may be many."""
    by_reason: dict[tuple[str, ...], list[str]] = {}
    for hypothesis in same:
        by_reason.setdefault(hypothesis.evidence, []).append(str(hypothesis.cause))
    for reason, causes in by_reason.items():
        yield from _wrap(f"{', '.join(causes)}", f"  {Verdict.NOT_TESTED:<13}", " " * 15)
        for text in reason:
            yield from _wrap(text, " " * 15, " " * 17)


def _field(label: str, text: str, hang: int = 0) -> Iterator[str]:
    yield from _wrap(text, f"{label:<{_LABEL}}", " " * (_LABEL + hang))


def _wrap(text: str, first: str, rest: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _rungs(diagnosis: Diagnosis) -> str:
    shown = [
        f"{rung.name} ({rung.left_out})"
        if rung.left_out
        else f"{rung.name} {rung.seconds * 1000:.0f} ms"
        for rung in diagnosis.rungs
    ]
    return f"{', '.join(shown)}; {diagnosis.seconds:.2f} s in all"


# -- Markdown -------------------------------------------------------------------------------------


def _markdown_lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"# {headline(diagnosis)}"
    for root in diagnosis.roots:
        yield ""
        yield from _root_markdown(root)
    yield ""
    yield f"**Symptom.** {diagnosis.symptom}"
    yield ""
    yield f"**Where it surfaced.** {diagnosis.surfaced}"
    for text in diagnosis.consequences:
        yield ""
        yield f"**Follows from it.** {text}"
    yield ""
    yield "| verdict | cause | kernel, argument | evidence |"
    yield "|---|---|---|---|"
    for hypothesis in diagnosis.hypotheses:
        where = ", ".join(filter(None, (hypothesis.kernel, hypothesis.argument)))
        evidence = "<br>".join(map(_cell, hypothesis.evidence))
        yield f"| {hypothesis.verdict} | {hypothesis.cause} | {_cell(where)} | {evidence} |"
    if diagnosis.unseen:
        yield ""
        yield "**Not seen.**"
        yield from (f"- {text}" for text in _by_reason(diagnosis.unseen))
    yield ""
    yield f"Rungs: {_rungs(diagnosis)}."


def _root_markdown(root: RootCause) -> Iterator[str]:
    yield f"**{root.cause}**{_of(root)}. {root.sentence}."
    yield ""
    if root.file:
        yield f"`{root.file}:{root.line}`: `{root.expression}`"
        yield ""
    yield f"**Fix.** {root.fix}."
    yield ""
    yield "| proof | |"
    yield "|---|---|"
    yield f"| red | {_cell(root.proof.red)} |"
    yield f"| corrected | {_cell(root.proof.corrected)} |"
    yield f"| green | {_cell(root.proof.green)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
