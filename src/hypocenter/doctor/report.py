"""A Diagnosis as text for a terminal; `markdown.py` has it as Markdown. Decides nothing.

The first lines are what to do at three in the morning: cause, the line to change, fix.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import (
    UNRECORDED,
    Diagnosis,
    GpuSight,
    Hypothesis,
    RootCause,
    RunMade,
    Verdict,
)
from hypocenter.doctor.difference import Answers
from hypocenter.doctor.gpu_sight import sight_lines, sight_text
from hypocenter.doctor.run_environment import RunEnvironment
from hypocenter.record.events import Place
from hypocenter.record.gap import Gap, GapKind
from hypocenter.wording import count_text

_WIDTH = 100
#: Verdicts that are told in full on request.
COUNTED = (Verdict.REFUTED, Verdict.NOT_TESTED)
#: Gaps whose `what` is a kernel.
_NOT_REPLAYED = (GapKind.NOT_REPLAYED, GapKind.SOURCE_NOT_RUN)
_LABEL = 11


@dataclass(frozen=True, slots=True)
class Origin:
    """What was diagnosed, as far as the command that replays it needs to know.

    `has_steps`: False for a program whose launches belong to no step; they count from 1 then.
    `needs_sources`: its kernels are not installed, so they run from the bundle's own text.
    `has_prompts`: the folder holds what was typed.
    """

    folder: str = "BUNDLE"
    has_steps: bool = True
    needs_sources: bool = False
    has_prompts: bool = False


def report_text(
    diagnosis: Diagnosis, origin: Origin | None = None, *, show_all: bool = False
) -> str:
    """The report in lines of at most 100 columns, but for paths.

    What is refuted and what was not tested are counted; with `show_all` they are told, and how
    long each check took.
    """
    lines = _text_lines(diagnosis, origin or Origin(), show_all)
    # A name of a bundle's may hold a line end, and no line of it may pass for one of ours.
    return "".join(line.replace("\n", "\\n") + "\n" for line in lines)


def headline(diagnosis: Diagnosis) -> str:
    """One line: whether the answers differ, what is not explained, and the first root cause."""
    return "; ".join((*(text for _, text in _preambles(diagnosis)), _found_text(diagnosis)))


def _preambles(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """What is to be known before any cause is read, each with its label."""
    if diagnosis.answers is Answers.SAME:
        yield "ANSWER", "both runs give the same answer"
    if diagnosis.is_unexplained:
        yield "OPEN", f"what is proven here does not explain this: {diagnosis.symptom}"


def _found_text(diagnosis: Diagnosis) -> str:
    if diagnosis.roots:
        root = diagnosis.roots[0]
        return f"{root.cause}{subject_of(root)}"
    confirmed = [
        hypothesis for hypothesis in diagnosis.hypotheses if hypothesis.verdict is Verdict.CONFIRMED
    ]
    if confirmed:
        causes = ", ".join(hypothesis.cause for hypothesis in confirmed)
        return f"no root cause is proven; confirmed: {causes}"
    if diagnosis.sights:
        return f"no root cause is proven; {sight_text(diagnosis.sights[0])}"
    if not diagnosis.has_symptom:
        if diagnosis.has_source_not_run:
            return "none found, but the kernels were not replayed"
        return "nothing found"
    return "no root cause is proven"


def subject_of(root: RootCause) -> str:
    """`: argument positions of kernel rope`: what stands behind the name of the cause."""
    named = f": argument {root.argument}" if root.argument else ""
    if root.argument and root.tensor and root.tensor != root.argument:
        named += f" (tensor {root.tensor})"
    return f"{named}{' of' if named else ':'} kernel {root.kernel}" if root.kernel else named


# -- parts that both formats have -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spot:
    """A line of somebody's source, and what stands there (`is_code`) or is done there."""

    label: str
    place: str
    text: str
    is_code: bool


def spots_of(root: RootCause) -> Iterator[Spot]:
    """The line to change, and then the one at which it shows, where that is another one."""
    meets = f"{root.file}:{root.line}" if root.file else ""
    expression = root.expression or ""
    culprit = root.culprit
    if culprit is not None and culprit.place != meets:
        yield Spot("Caused by", culprit.place, culprit.does, is_code=False)
    if meets:
        is_culprit = culprit is not None and culprit.place == meets
        yield Spot("Caused by" if is_culprit else "Faults at", meets, expression, is_code=True)


@dataclass(frozen=True, slots=True)
class HypothesisRow:
    """Hypotheses of one verdict with the same evidence, which is told once for all of them."""

    verdict: Verdict
    causes: tuple[str, ...]
    where: str
    diagnostic: str
    evidence: tuple[str, ...]
    would_refute: str


def hypothesis_rows(
    diagnosis: Diagnosis, verdicts: Collection[Verdict], said: str = ""
) -> list[HypothesisRow]:
    """The hypotheses with these verdicts; evidence that `said` holds already is left out."""
    rows: dict[object, list[Hypothesis]] = {}
    for hypothesis in diagnosis.hypotheses:
        if hypothesis.verdict in verdicts:
            where = (hypothesis.kernel, hypothesis.argument)
            # What is confirmed has a place of its own, each.
            own = hypothesis.cause if hypothesis.verdict is Verdict.CONFIRMED else ""
            key = (hypothesis.verdict, where, hypothesis.evidence, own)
            rows.setdefault(key, []).append(hypothesis)
    told: dict[str, str] = {}
    return [
        HypothesisRow(
            same[0].verdict,
            tuple(str(hypothesis.cause) for hypothesis in same),
            ", ".join(filter(None, (same[0].kernel, same[0].argument))),
            same[0].diagnostic,
            _told_once([text for text in same[0].evidence if text not in said], same[0], told),
            same[0].would_refute,
        )
        for same in rows.values()
    ]


def _told_once(evidence: list[str], of: Hypothesis, told: dict[str, str]) -> tuple[str, ...]:
    """The evidence without what `told` has of a row before; that row where nothing is left."""
    new = tuple(text for text in evidence if text not in told)
    as_before = tuple(f"as for {told[text]}" for text in evidence if text in told)
    told |= {text: str(of.cause) for text in new}
    return new or as_before[:1]


def text_said(diagnosis: Diagnosis) -> str:
    """What the lines above the hypotheses have told of the causes."""
    return "\n".join(
        text
        for root in diagnosis.roots
        for text in (root.sentence, root.proof.red, root.proof.green, root.fix)
    )


def count_of_others(diagnosis: Diagnosis) -> str:
    """`21 causes refuted, 9 not tested`."""
    refuted, untested = (
        len({row.cause for row in diagnosis.hypotheses if row.verdict is verdict})
        for verdict in COUNTED
    )
    return f"{count_text(refuted, 'cause')} refuted, {untested} not tested"


def unseen_by_reason(unseen: Sequence[Gap]) -> Iterator[str]:
    """Kernels that were not replayed for one reason stand in one line."""
    kernels: dict[str, dict[str, None]] = {}
    for gap in unseen:
        if gap.kind in _NOT_REPLAYED:
            kernels.setdefault(gap.reason, {})[gap.what] = None
        else:
            yield str(gap)
    for reason, names in kernels.items():
        yield f"not replayed: {', '.join(names)}: {reason}"


def run_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Label and text of each run that the command took, where it was run again."""
    for number, run in enumerate(diagnosis.runs, 1):
        yield f"RUN {number}", run_text(run)


def run_text(run: RunMade) -> str:
    """One line: how it was run, how it ended, what it showed."""
    if run.left_out:
        return f"{run.name}: left out: {run.left_out}"
    told = " (this report)" if run.is_told else ""
    return f"{run.name}{told}: {run.ended}; {run.found}"


def environment_rows(environment: RunEnvironment) -> Iterator[tuple[str, str]]:
    """Label and text of what the run had around it."""
    versions = (
        ("hypocenter", environment.hypocenter),
        ("Python", environment.python),
        ("torch", environment.torch),
        ("Triton", environment.triton),
    )
    yield "versions", ", ".join(f"{name} {_version(version)}" for name, version in versions)
    yield "system", environment.platform or _UNKNOWN
    device = environment.device or _UNKNOWN
    yield "device", f"{device} ({environment.gpu})" if environment.gpu else device
    driver = environment.driver
    yield "GPU driver", _UNKNOWN if driver is None else driver or "none is loaded"
    model = environment.model
    yield (
        "model",
        f"{model.name} (architecture {model.architecture}, {model.quantisation})"
        if model is not None
        else _UNKNOWN,
    )
    yield "command", environment.command or _UNKNOWN
    yield "began", environment.started or _UNKNOWN
    if environment.variables:
        pairs = (f"{name}={value}" for name, value in environment.variables.items())
        yield "variables", " ".join(pairs)


_UNKNOWN = "not recorded"


def _version(version: str | None) -> str:
    return _UNKNOWN if version is None else version or "not installed"


# -- text -----------------------------------------------------------------------------------------


def _text_lines(diagnosis: Diagnosis, origin: Origin, show_all: bool) -> Iterator[str]:
    if not diagnosis.roots:
        yield from _field("CAUSE", headline(diagnosis))
        for text in _what_would_help(diagnosis):
            yield from _field("", text)
    else:
        for label, text in _preambles(diagnosis):
            yield from _field(label, text)
    for number, root in enumerate(diagnosis.roots):
        if number:
            yield ""
            yield from _field("ALSO", "a second defect, with a proof of its own")
        yield from _root_text(root, origin)
    yield ""
    yield from _field("SYMPTOM", diagnosis.symptom)
    yield from _field("SURFACED", diagnosis.surfaced)
    for label, text in (
        *run_rows(diagnosis),
        *(("FOLLOWS", text) for text in diagnosis.consequences),
    ):
        yield from _field(label, text)
    for sight in diagnosis.sights:
        yield from _sight_text(sight)
    yield ""
    yield "HYPOTHESES"
    shown = [verdict for verdict in Verdict if show_all or verdict not in COUNTED]
    for row in hypothesis_rows(diagnosis, shown, text_said(diagnosis)):
        yield from _row_text(row, show_all)
    if not show_all:
        yield from _wrap(f"{count_of_others(diagnosis)} (--all shows them)", "  ", "  ")
    if diagnosis.unseen:
        yield ""
        yield "NOT SEEN"
        for text in unseen_by_reason(diagnosis.unseen):
            yield from _wrap(text, "  - ", "    ")
    yield ""
    yield "ENVIRONMENT"
    for label, text in environment_rows(diagnosis.environment):
        yield from _wrap(text, f"  {label:<12}", " " * 14)
    if show_all:
        yield ""
        yield from _field("CHECKS", _rungs(diagnosis))
    if diagnosis.has_symptom or not diagnosis.is_clean:
        yield ""
        yield from _field("ATTACH", _what_to_attach(origin))


def _sight_text(sight: GpuSight) -> Iterator[str]:
    """Where a GPU stood, by its dump."""
    first, *rest = sight_lines(sight)
    yield from _field("GPU", first)
    if sight.text:
        yield f"{'':<{_LABEL}}    {sight.text}"
    for text in rest:
        yield from _field("", text)


def _what_to_attach(origin: Origin) -> str:
    """What whoever is asked for help needs to have."""
    kept = "prompts are" if origin.has_prompts else "no prompt is"
    return (
        f"to an issue: the output of `hypo doctor --markdown {shlex.quote(origin.folder)}` and of "
        f"`hypo env`; {kept} in the bundle"
    )


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


def _root_text(root: RootCause, origin: Origin) -> Iterator[str]:
    yield from _field("CAUSE", f"{root.cause}{subject_of(root)}")
    yield from _field("", root.sentence)
    for spot in spots_of(root):
        yield f"{spot.label.upper():<{_LABEL}}{spot.place}"
        if spot.text:
            yield f"{'':<{_LABEL}}    {spot.text}"
    yield from _field("FIX", root.fix)
    if root.place is not None:
        yield from _when(root.place, root.launched_at, origin)
    yield ""
    yield from _field("PROOF", f"fails   {root.proof.red}", hang=8)
    yield from _field("", f"change  {root.proof.corrected}", hang=8)
    yield from _field("", f"passes  {root.proof.green}", hang=8)


def _when(place: Place, launched_at: str, origin: Origin) -> Iterator[str]:
    if origin.has_steps:
        when = f"step {place.step}, launch {place.launch}"
        which = f"--step {place.step} --launch {place.launch}"
    else:
        at = f", launched at {launched_at}" if launched_at else ""
        when, which = f"launch {place.step}{at}", f"--launch {place.step}"
    sources = " --run-sources" if origin.needs_sources else ""
    yield f"{'WHEN':<{_LABEL}}{when}"
    yield f"{'REPLAY':<{_LABEL}}hypo replay {shlex.quote(origin.folder)} {which}{sources}"


def _row_text(row: HypothesisRow, show_all: bool) -> Iterator[str]:
    where = f" ({row.where})" if row.where else ""
    by = f"  [{row.diagnostic}]" if row.diagnostic and show_all else ""
    yield from _wrap(f"{', '.join(row.causes)}{where}{by}", f"  {row.verdict:<13}", " " * 15)
    for text in row.evidence:
        yield from _wrap(text, " " * 15, " " * 17)
    if row.would_refute and row.verdict is not Verdict.REFUTED:
        yield from _wrap(f"would refute it: {row.would_refute}", " " * 15, " " * 17)


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
