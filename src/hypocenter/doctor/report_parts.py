"""What every form of the report says, as plain records and single sentences; forms are not here.

`report.py` prints it as text, `markdown.py` as Markdown, `page/` as a page. Decides nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from hypocenter.base.wording import bare_name, count_text
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.compared_text import compared_lines, compared_text
from hypocenter.doctor.diagnosis import (
    WITH_VALUES,
    Diagnosis,
    Effect,
    Hypothesis,
    RootCause,
    RunMade,
    Verdict,
)
from hypocenter.doctor.difference import Answers
from hypocenter.doctor.gpu_sight import sight_text
from hypocenter.doctor.run_environment import RunEnvironment
from hypocenter.record.gap import Gap, GapKind

#: Verdicts that are told in full on request.
COUNTED = (Verdict.REFUTED, Verdict.NOT_TESTED)
#: Gaps whose `what` is a kernel.
_NOT_REPLAYED = (GapKind.NOT_REPLAYED, GapKind.SOURCE_NOT_RUN)
_UNKNOWN = "not recorded"


@dataclass(frozen=True, slots=True)
class Origin:
    """What was diagnosed, as far as the command that replays it needs to know.

    `has_steps`: False for a program whose launches belong to no step; they count from 1 then.
    `needs_sources`: its kernels are not installed, so they run from the bundle's own text.
    `has_prompts`: the folder holds what was typed. `folder` is empty where none was saved; with
    `options` it gives the same result again.
    """

    folder: str = "BUNDLE"
    options: tuple[str, ...] = ()
    has_steps: bool = True
    needs_sources: bool = False
    has_prompts: bool = False


def headline(diagnosis: Diagnosis) -> str:
    """One line: whether the answers differ, what is not explained, and the first root cause."""
    return "; ".join((*(text for _, text in preambles(diagnosis)), _found_text(diagnosis)))


def preambles(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """What is to be known before any cause is read, each with its label."""
    if diagnosis.answers is Answers.SAME:
        yield "ANSWER", "both runs give the same answer"
    if diagnosis.is_unexplained:
        yield "OPEN", f"what is proven here does not explain this: {diagnosis.symptom}"
    if diagnosis.roots and diagnosis.roots[0].zeros:
        yield "OPEN", _zeros_text(diagnosis.roots[0].zeros)


def _zeros_text(what: str) -> str:
    return f"{what} leads to addresses, and was replayed as zeros"


def _found_text(diagnosis: Diagnosis) -> str:
    zeros = [gap.what for gap in diagnosis.unseen if gap.kind is GapKind.ZEROS]
    found = _bare_found_text(diagnosis)
    return f"{found}; {_zeros_text(', '.join(zeros))}" if zeros and not diagnosis.roots else found


def _bare_found_text(diagnosis: Diagnosis) -> str:
    if diagnosis.roots:
        root = diagnosis.roots[0]
        return f"{root.cause}{subject_of(root)}"
    confirmed = [
        hypothesis for hypothesis in diagnosis.hypotheses if hypothesis.verdict is Verdict.CONFIRMED
    ]
    if confirmed:
        causes = dict.fromkeys(map(_confirmed_text, confirmed))
        return f"no root cause is proven; confirmed: {', '.join(causes)}"
    if diagnosis.sights:
        return f"no root cause is proven; {sight_text(diagnosis.sights[0])}"
    if diagnosis.compared is not None:
        return f"no root cause is proven; {compared_text(diagnosis.compared)}"
    if diagnosis.not_compared:
        return f"the runs cannot be compared: {diagnosis.not_compared}"
    if not diagnosis.has_symptom:
        if diagnosis.has_source_not_run:
            return "none found, but the kernels were not replayed"
        return "nothing found"
    return "no root cause is proven"


def _confirmed_text(hypothesis: Hypothesis) -> str:
    """The cause; of an access that was seen the kernel, without its signature, and the line."""
    if not hypothesis.at:
        return hypothesis.cause
    by = f" by {bare_name(hypothesis.kernel)}" if hypothesis.kernel else ""
    return f"{hypothesis.cause}{by} at {hypothesis.at}"


def compared_rows(diagnosis: Diagnosis) -> tuple[str, ...]:
    """What the program itself found unequal, where nothing is proven that led there."""
    if diagnosis.compared is None or diagnosis.roots:
        return ()
    return tuple(compared_lines(diagnosis.compared))


def subject_of(root: RootCause) -> str:
    """`: argument positions of kernel rope`: what stands behind the name of the cause."""
    named = f": argument {root.argument}" if root.argument else ""
    if root.argument and root.tensor and root.tensor != root.argument:
        named += f" (tensor {root.tensor})"
    return f"{named}{' of' if named else ':'} kernel {root.kernel}" if root.kernel else named


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
    for card in environment.cards:
        yield "GPU", card
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


def _version(version: str | None) -> str:
    return _UNKNOWN if version is None else version or "not installed"


def what_would_help(diagnosis: Diagnosis) -> Iterator[str]:
    """What was not looked at and easily could be, where nothing was found."""
    if diagnosis.has_source_not_run:
        yield (
            "the program's own kernels were not replayed: their recorded source was not run; "
            "--run-sources runs it"
        )
    if any(gap.kind is GapKind.ZEROS for gap in diagnosis.unseen):
        yield f"what it held was not recorded: {WITH_VALUES}"
    yield from _observations(diagnosis)
    blind: dict[str, list[str]] = {}
    for hypothesis in diagnosis.hypotheses if diagnosis.is_clean else ():
        if hypothesis.is_unrecorded:
            blind.setdefault("; ".join(hypothesis.evidence), []).append(hypothesis.cause)
    for reason, causes in blind.items():
        yield f"not tested: {', '.join(causes)}: {reason}"
    wrong = [
        hypothesis for hypothesis in diagnosis.hypotheses if hypothesis.cause is Cause.WRONG_ANSWER
    ]
    if diagnosis.is_clean and any(hypothesis.verdict is Verdict.NOT_TESTED for hypothesis in wrong):
        yield (
            "a wrong answer shows only beside a run that is right, and none is given: add --good "
            "BUNDLE"
        )


def _observations(diagnosis: Diagnosis) -> Iterator[str]:
    """What the run itself was seen to do, where that is all that is known of it."""
    for hypothesis in diagnosis.hypotheses:
        if hypothesis.is_observed and hypothesis.verdict is Verdict.INCONCLUSIVE:
            yield "; ".join(hypothesis.evidence)


def what_to_attach(origin: Origin) -> str:
    """What whoever is asked for help needs to have."""
    if not origin.folder:
        return "to an issue: this report, for no bundle was saved, and the output of `hypo env`"
    kept = "prompts are" if origin.has_prompts else "no prompt is"
    words = shlex.join(("hypo", "doctor", "--markdown", *origin.options, origin.folder))
    return f"to an issue: the output of `{words}` and of `hypo env`; {kept} in the bundle"


@dataclass(frozen=True, slots=True)
class When:
    """The launch that a root cause is about, in words, and the command that replays it; "" where
    no bundle was saved.
    """

    launch: str
    command: str


def when_of(root: RootCause, origin: Origin) -> When | None:
    """None for a cause that is about no launch."""
    place = root.place
    if place is None:
        return None
    if origin.has_steps:
        when = f"step {place.step}, launch {place.launch}"
        which = f"--step {place.step} --launch {place.launch}"
    else:
        at = f", launched at {root.launched_at}" if root.launched_at else ""
        when, which = f"launch {place.step}{at}", f"--launch {place.step}"
    sources = " --run-sources" if origin.needs_sources else ""
    if not origin.folder:
        return When(when, "")
    return When(when, f"hypo replay {shlex.quote(origin.folder)} {which}{sources}")


def fix_rows(root: RootCause) -> tuple[tuple[str, str], ...]:
    """Whether the fix itself was tried, other fixes that fit as well, what else was found."""
    rows: list[tuple[str, str]] = []
    if root.alternatives:
        rows += [("Or", other.fix) for other in root.alternatives if other.fix != root.fix]
        rows.append(("Tried", "each of these is clean when replayed; which is meant is not proven"))
    elif root.effect is not None:
        rows.append(("Tried", _effect_text(root.effect)))
    elif root.finding is not None:
        rows.append(("Tried", "not the fix: the change below is a test of the cause alone"))
    if root.beside:
        more = count_text(len(root.beside), "other fault")
        rows.append(("Beside", f"{more} in the same replay: {root.beside[0]}"))
    return tuple(rows)


def _effect_text(effect: Effect) -> str:
    """What a fix that was applied and replayed did."""
    done = []
    if effect.num_gone:
        done.append(f"{count_text(effect.num_gone, 'access', 'accesses')} outside gone")
    if effect.num_filled > 0:
        done.append(f"{count_text(effect.num_filled, 'more element')} written")
    lost = effect.num_lost + effect.num_moved
    kept = "no access inside lost or moved"
    if lost:
        kept = f"{count_text(lost, 'access', 'accesses')} inside lost or moved ({effect.excused})"
    if not effect.num_unwritten:
        kept += ", every element written as before"
    return "; ".join((*done, kept))


def proof_rows(root: RootCause) -> tuple[tuple[str, str], ...]:
    """The test that fails, the one change, and the same test that passes, each with its label."""
    proof = root.proof
    return ("fails", proof.red), ("change", proof.corrected), ("passes", proof.green)


#: Checks that took less are counted alone.
_SHOWN_SECONDS = 1e-3


def rungs_text(diagnosis: Diagnosis) -> str:
    shown = [f"{rung.name} ({rung.left_out})" for rung in diagnosis.rungs if rung.left_out]
    ran = [rung for rung in diagnosis.rungs if not rung.left_out]
    slow = [rung for rung in ran if rung.seconds >= _SHOWN_SECONDS]
    shown += [f"{rung.name} {rung.seconds * 1000:.0f} ms" for rung in slow]
    if len(ran) > len(slow):
        shown.append(f"{len(ran) - len(slow)} {'others ' if slow else ''}under 1 ms each")
    return f"{', '.join(shown)}; {diagnosis.seconds:.2f} s in all"
