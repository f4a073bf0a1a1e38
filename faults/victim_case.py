"""Victims and harmless changes as rows: what the doctor makes of the bundle that each left.

The truth comes from the victim's file alone, and the doctor gets the bundle alone.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from faults.harmless import harmless
from faults.judge import Root, Verdict, judged, refuted
from faults.report import means_the_same, told_of, with_edits
from faults.row import Again, Case, Platform, Role, Row
from faults.victim import Harmless, Planted, Victim, victims
from faults.victim_run import Outcome, run_child
from hypocenter.base.errors import UsageError
from hypocenter.base.package import kernel_module
from hypocenter.device.limits import present_gpu
from hypocenter.doctor import diagnosis
from hypocenter.doctor.doctor import diagnose
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle


def declared_on(platform: Platform, victim: Victim) -> Victim:
    """The victim with the symptom that it has on a platform."""
    if platform is Platform.EMULATED and victim.as_machine_code:
        return replace(victim, symptom=victim.as_machine_code)
    return victim


def other_symptom(platform: Platform, observed: str, victim: Victim) -> list[str]:
    """What is wrong about a symptom: nothing on a card, whose memory need not fault."""
    declared = declared_on(platform, victim).symptom
    is_right = platform is Platform.CARD or observed == declared
    return [] if is_right else [f"{observed} instead of {declared}"]


@dataclass(frozen=True, slots=True)
class VictimCase(Case):
    """A victim and its healthy twin."""

    victim: Victim
    collection: str = "victims"

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.victim.name

    @property
    def platforms(self) -> frozenset[Platform]:  # type: ignore[override]
        own = _platform_of(self.victim)
        others = {Platform.CARD} if self.victim.on_card else set()
        if own is Platform.SIMULATED and not self.victim.of_nvidia:
            others |= {Platform.EMULATED}
        return frozenset({own, *others})

    def run(self, platform: Platform, work: Path) -> list[Row]:
        folder, device = work / self.name, _device(platform)
        own = declared = declared_on(platform, self.victim)
        is_real = platform is Platform.CARD
        if is_real:  # beside a real GPU the twin is traced as what is compared with it
            declared = replace(declared, symptom="differs")
        healthy = run_child(declared, folder / "twin", twin=True, device=device)
        outcome = run_child(own, folder / "victim", twin=False, device=device)
        if is_real and outcome.bundle is None:
            # A real allocator need not fault where a simulated one does.
            outcome = run_child(declared, folder / "again", twin=False, device=device)
        return [
            self._fault(platform, outcome, healthy),
            _healthy(self, Role.TWIN, platform, healthy, None),
        ]

    def _fault(self, platform: Platform, outcome: Outcome, healthy: Outcome) -> Row:
        observed = outcome.symptom(healthy)
        row = Row(
            collection=self.collection,
            name=self.name,
            platform=platform,
            role=Role.FAULT,
            symptom=observed,
            exit_code=outcome.ended.exit_code,
        )
        good = healthy.bundle if declared_on(platform, self.victim).symptom == "differs" else None
        found = _diagnosis(outcome.bundle, good)
        problems = other_symptom(platform, observed, self.victim)
        if found is not None and not _explains(found, self.victim.address):
            problems.append("the fault's address is not explained")
        roots = _roots(found)
        row = msgspec.structs.replace(
            row, roots=roots, seconds=found.seconds if found else 0.0, problems=problems
        )
        return row.with_verdict(self.verdict(roots, outcome.bundle))

    def named_again(self, work: Path, without: Collection[str]) -> Again | None:
        folder = work / self.name
        made = next(
            (folder / one for one in ("again", "victim") if _has_bundle(folder / one)), None
        )
        if made is None:
            return None
        bundle, good = bundles.load(made / "bundle"), None
        if self.victim.symptom == "differs":
            good = bundles.load(folder / "twin" / "bundle")
        found = diagnose(bundle, good, allow_source=True, without=without)
        verdict = self.verdict(_roots(found), bundle)
        is_right = verdict.says == "right" and _explains(found, self.victim.address)
        return Again.of(found, is_right)

    def verdict(self, roots: Sequence[Root] | None, bundle: Bundle | None) -> Verdict:
        """What the causes of a report are worth; its fix must give a kernel back its own text."""
        guilty = [
            place
            for source in (bundle.sources if bundle is not None else ())
            for place in self.victim.truth.places(source.file, source.text, source.first_line)
        ]
        verdict = judged(roots, self.victim.truth, guilty)
        given = [_gives_back(root) for root in roots or ()]
        return refuted(verdict) if False in given else verdict


@dataclass(frozen=True, slots=True)
class HarmlessCase(Case):
    """A change that does no harm, beside its twin as the good run."""

    change: Harmless
    collection: str = "harmless"

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.change.name

    @property
    def platforms(self) -> frozenset[Platform]:  # type: ignore[override]
        return frozenset({_platform_of(self.change)})

    def run(self, platform: Platform, work: Path) -> list[Row]:
        folder = work / self.name
        healthy = run_child(self.change, folder / "twin", twin=True)
        outcome = run_child(self.change, folder / "it", twin=False)
        return [_healthy(self, Role.HEALTHY, platform, outcome, healthy)]

    def named_again(self, work: Path, without: Collection[str]) -> Again | None:
        return None


def cases() -> Iterator[Case]:
    """All victims and harmless changes."""
    yield from map(VictimCase, victims())
    yield from map(HarmlessCase, harmless())


def _platform_of(planted: Planted) -> Platform:
    return Platform.CPU if planted.device == "cpu" else Platform.SIMULATED


def _device(platform: Platform) -> str:
    """That of a run; empty for the victim's own."""
    if platform is Platform.EMULATED:
        return platform.value
    if platform is not Platform.CARD:
        return ""
    gpu = present_gpu()
    if gpu is None:
        raise UsageError("there is no GPU for --platform card; leave it out to run without one")
    return gpu.backend


def _healthy(
    case: Case, role: Role, platform: Platform, outcome: Outcome, twin: Outcome | None
) -> Row:
    """What was claimed or confirmed of a run that is well, beside another where there is one."""
    observed = outcome.symptom(twin)
    found = _diagnosis(outcome.bundle, twin.bundle if twin else None)
    problems = [] if observed == "none" else [f"{observed} instead of none"]
    confirmed = diagnosis.Verdict.CONFIRMED
    problems += [
        f"confirmed: {one.cause.value}"
        for one in (found.hypotheses if found else ())
        if one.verdict is confirmed
    ]
    return Row(
        collection=case.collection,
        name=case.name,
        platform=platform,
        role=role,
        symptom=observed,
        seconds=found.seconds if found else 0.0,
        exit_code=outcome.ended.exit_code,
        roots=_roots(found),
        problems=problems,
    )


def _diagnosis(bundle: Bundle | None, good: Bundle | None) -> diagnosis.Diagnosis | None:
    # The kernels are ours, and may be run from the bundle's text.
    return diagnose(bundle, good, allow_source=True) if bundle is not None else None


def _roots(found: diagnosis.Diagnosis | None) -> list[Root] | None:
    if found is None:
        return None
    return [told_of(root) for root in msgspec.to_builtins(found.roots)]


def _explains(found: diagnosis.Diagnosis, words: str) -> bool:
    """Whether some evidence says where the fault's address lies, in the victim's words."""
    evidence = (text for hypothesis in found.hypotheses for text in hypothesis.evidence)
    return not words or any("the fault's address" in text and words in text for text in evidence)


def _gives_back(root: Root) -> bool | None:
    """Whether a fix of a changed kernel makes of its file what it was; None where no data says how.

    A copy is named after the module that it was made of.
    """
    edits = root.get("edits") or ()
    file = Path(edits[0]["file"]) if edits else None
    if file is None or not file.is_file():
        return None
    text = with_edits(file, edits)
    try:
        module = kernel_module(file.stem.partition("-")[0])
    except KeyError:
        return None
    was = inspect.getsource(importlib.import_module(module))
    return None if text is None else means_the_same(text, was)


def _has_bundle(folder: Path) -> bool:
    return (folder / "bundle").is_dir()
