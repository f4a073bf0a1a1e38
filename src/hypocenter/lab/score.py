"""How well the doctor does: its diagnosis of each bundle against what the victim's file says.

The truth comes from the victim's file alone, and the doctor gets the bundle alone.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from hypocenter.doctor.diagnosis import Diagnosis, RootCause, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.lab.run import Outcome, run_child
from hypocenter.lab.victim import SYMPTOMS, Harmless, Victim
from hypocenter.record.bundle import Bundle


class TwinScore(msgspec.Struct, frozen=True, kw_only=True):
    """The healthy twin: what was seen of it, and what the doctor found, which should be nothing."""

    observed: str
    found: tuple[str, ...]
    seconds: float


_UNSEEN = TwinScore(observed="none", found=(), seconds=0.0)


class HarmlessScore(msgspec.Struct, frozen=True, kw_only=True):
    """A harmless change: how its run ended, and what the doctor found beside its twin: nothing."""

    name: str
    observed: str
    answers: str
    found: tuple[str, ...]
    seconds: float


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One victim. `line_named` is None where no line is to blame; `found` is the root as told.

    `observed` is the symptom that the run really had; `proof`: a root with its red and green half;
    `address_explained` is None where the victim says nothing of a fault's address.
    """

    victim: str
    symptom: str
    observed: str
    detected: bool
    kernel_named: bool
    argument_named: bool
    line_named: bool | None
    class_right: bool
    proof: bool
    address_explained: bool | None = None
    seconds: float
    found: str
    twin: TwinScore


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of a victim and of its twin, before any doctor has seen them."""

    victim: Victim
    outcome: Outcome
    healthy: Outcome


def examine(
    victims: Sequence[Victim], folder: Path, *, device: str = "", num_jobs: int = 2
) -> Iterator[Examined]:
    """Run victims and twins, several at a time; in order."""

    def both(victim: Victim) -> Examined:
        own = folder / victim.name
        healthy = run_child(victim, own / "twin", twin=True, device=device)
        outcome = run_child(victim, own / "victim", twin=False, device=device)
        return Examined(victim=victim, outcome=outcome, healthy=healthy)

    with ThreadPoolExecutor(num_jobs) as pool:
        yield from pool.map(both, victims)


def score_all(
    victims: Sequence[Victim],
    *,
    device: str = "",
    num_jobs: int = 2,
    tell: Callable[[Score], object] = lambda score: None,
) -> list[Score]:
    """Run and score each victim; `tell` hears each score as it comes."""
    scores = []
    with tempfile.TemporaryDirectory(prefix="hypo-lab-") as folder:
        for examined in examine(victims, Path(folder), device=device, num_jobs=num_jobs):
            scores.append(score(examined))
            tell(scores[-1])
    return scores


def score(examined: Examined, without: Collection[str] = (), *, with_twin: bool = True) -> Score:
    """Have both bundles diagnosed and compare; `without` names rungs of the doctor to leave out.

    Without its twin, which then counts as healthy, a victim is scored in half the time.
    """
    victim, bundle = examined.victim, examined.outcome.bundle
    observed = examined.outcome.symptom(examined.healthy)
    good = examined.healthy.bundle if victim.symptom == "differs" else None
    # The lab's own kernels may be run from the bundle's text.
    found = None
    if bundle is not None:
        found = diagnose(bundle, good, allow_source=True, without=without)
    root = _main_root(found)
    return Score(
        victim=victim.name,
        symptom=victim.symptom,
        observed=observed,
        detected=found is not None and not found.is_clean,
        kernel_named=root is not None and _same_kernel(root.kernel, victim.kernel),
        argument_named=root is not None and _same_argument(root.argument, victim),
        line_named=_same_line(root, victim.lines, bundle) if victim.lines else None,
        class_right=root is not None and root.cause is victim.cause,
        proof=root is not None and bool(root.proof.red and root.proof.green),
        address_explained=_explains(found, victim.address) if victim.address else None,
        seconds=found.seconds if found else 0.0,
        found=_root_text(root),
        twin=_twin(examined.healthy, without) if with_twin else _UNSEEN,
    )


def score_harmless(
    changes: Sequence[Harmless],
    *,
    device: str = "",
    num_jobs: int = 2,
    tell: Callable[[HarmlessScore], object] = lambda score: None,
) -> list[HarmlessScore]:
    """Run and score harmless changes; those of one twin share its run."""
    scores = []
    with (
        tempfile.TemporaryDirectory(prefix="hypo-lab-") as folder,
        ThreadPoolExecutor(num_jobs) as pool,
    ):
        twins: dict[object, Future[Outcome]] = {}
        runs = []
        for change in changes:
            own = Path(folder) / change.name
            key = change.twin, change.device
            if key not in twins:
                twins[key] = pool.submit(run_child, change, own / "twin", twin=True, device=device)
            runs.append(pool.submit(run_child, change, own / "it", twin=False, device=device))
        for change, run in zip(changes, runs, strict=True):
            healthy = twins[change.twin, change.device].result()
            scores.append(_score_harmless(change, run.result(), healthy))
            tell(scores[-1])
    return scores


def _score_harmless(change: Harmless, outcome: Outcome, healthy: Outcome) -> HarmlessScore:
    assert outcome.bundle is not None  # suspected, both
    assert healthy.bundle is not None
    found = diagnose(outcome.bundle, healthy.bundle, allow_source=True)
    return HarmlessScore(
        name=change.name,
        observed=outcome.symptom(healthy),
        answers=found.answers.value if found.answers else "",
        found=_findings(found),
        seconds=found.seconds,
    )


def _findings(found: Diagnosis) -> tuple[str, ...]:
    """What was claimed or confirmed."""
    confirmed = [h.cause.value for h in found.hypotheses if h.verdict is Verdict.CONFIRMED]
    return tuple(dict.fromkeys([*(_root_text(root) for root in found.roots), *confirmed]))


def _twin(healthy: Outcome, without: Collection[str]) -> TwinScore:
    assert healthy.bundle is not None  # a twin is always suspected
    found = diagnose(healthy.bundle, allow_source=True, without=without)
    return TwinScore(observed=healthy.symptom(), found=_findings(found), seconds=found.seconds)


def _main_root(found: Diagnosis | None) -> RootCause | None:
    return found.roots[0] if found is not None and found.roots else None


def _explains(found: Diagnosis | None, words: str) -> bool:
    """Whether some evidence says where the fault's address lies, in the victim's words."""
    if found is None:
        return False
    evidence = (text for hypothesis in found.hypotheses for text in hypothesis.evidence)
    return any("the fault's address" in text and words in text for text in evidence)


def _root_text(root: RootCause | None) -> str:
    if root is None:
        return ""
    place = ".".join(part for part in (root.kernel, root.argument) if part)
    return f"{root.cause.value}: {place or '(no kernel)'}"


def _same_kernel(named: str | None, right: str | None) -> bool:
    """Whichever of its two names the report gives: the launch's, or the function's."""
    return (named.removesuffix("_kernel") if named else named) == right


def _same_argument(named: str | None, victim: Victim) -> bool:
    if victim.argument is None:  # nothing that could be named wrongly
        return True
    if named is None:
        return False
    return named.removesuffix("_ptr") in (victim.argument, *victim.also)


def _same_line(root: RootCause | None, right: tuple[str, ...], bundle: Bundle | None) -> bool:
    if root is None or bundle is None or root.line is None:
        return False
    for source in bundle.sources:
        lines = source.text.splitlines()
        at = root.line - source.first_line
        if source.file == root.file and 0 <= at < len(lines) and lines[at].strip() in right:
            return True
    return False


def merit(scores: Sequence[Score]) -> int:
    """How much was told right, over all: one for each thing of each victim."""
    return sum(
        score.detected
        + score.kernel_named
        + score.argument_named
        + bool(score.line_named)
        + score.class_right
        + score.proof
        + bool(score.address_explained)
        for score in scores
    )


# -- totals ---------------------------------------------------------------------------------------


class Total(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over the victims of one symptom, or over all; the first of each pair is of `num`."""

    symptom: str
    num: int
    as_declared: int
    detected: int
    kernel_named: int
    argument_named: int
    line_named: int
    num_with_line: int
    class_right: int
    proof: int
    false_findings: int
    median_seconds: float
    most_seconds: float


def total(scores: Sequence[Score], symptom: str = "all") -> Total:
    """Of all scores, or of those with the declared symptom."""
    own = [score for score in scores if symptom in ("all", score.symptom)]
    seconds = [score.seconds for score in own] or [0.0]
    return Total(
        symptom=symptom,
        num=len(own),
        as_declared=sum(o.observed == o.symptom and o.twin.observed == "none" for o in own),
        detected=sum(score.detected for score in own),
        kernel_named=sum(score.kernel_named for score in own),
        argument_named=sum(score.argument_named for score in own),
        line_named=sum(score.line_named is True for score in own),
        num_with_line=sum(score.line_named is not None for score in own),
        class_right=sum(score.class_right for score in own),
        proof=sum(score.proof for score in own),
        false_findings=sum(bool(score.twin.found) for score in own),
        median_seconds=statistics.median(seconds),
        most_seconds=max([*seconds, *(score.twin.seconds for score in own)]),
    )


def totals(scores: Sequence[Score]) -> list[Total]:
    """A line for each symptom that occurs, and one for all."""
    declared = {score.symptom for score in scores}
    return [total(scores, s) for s in SYMPTOMS if s in declared] + [total(scores)]
