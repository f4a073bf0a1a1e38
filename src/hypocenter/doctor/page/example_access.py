"""The access that goes wrong, one lane of it as an example: the proof's own, or that of a replay.

A replay here proves nothing: it shows values beside a cause that is proven already.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.base.errors import HypoError, MissingPackage
from hypocenter.base.tensor import DType
from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.events import OUTSIDE_PLANS, Place, TensorRecord
from hypocenter.replay.findings import Finding, FindingKind
from hypocenter.replay.terms import KernelText, Schedule

_SECONDS = 4.0
#: Kinds of findings whose access goes to where its tensor is not.
OUTSIDE = (
    FindingKind.OUT_OF_BOUNDS,
    FindingKind.FREED_MEMORY,
    FindingKind.NULL_POINTER,
    FindingKind.HOST_POINTER,
    FindingKind.WRONG_DEVICE,
    FindingKind.WILD_POINTER,
)


@dataclass(frozen=True, slots=True)
class ExampleAccess:
    """`shown` is the finding of the blamed argument, `outside` the first that leaves its tensor.

    They are one and the same mostly. Both are None where nothing was replayed.
    """

    shown: Finding | None = None
    outside: Finding | None = None


def example_of(case: Case, root: RootCause) -> ExampleAccess:
    """The finding of the proof; else of a replay of that launch, where it may and can be run."""
    if root.finding is not None:
        is_outside = root.finding.kind in OUTSIDE or root.finding.is_overflow
        return ExampleAccess(root.finding, root.finding if is_outside else None)
    found = _replay_findings(case, root.place) if root.place is not None else ()
    use = launch_of_root(case, root)
    if not found or use is None:
        return ExampleAccess()
    same = [
        finding
        for finding in found
        if finding.argument and case.fact_of(use.launch, finding.argument) == root.argument
    ]
    at_line = [finding for finding in (*same, *found) if finding.line == root.line]
    shown = next(iter((*at_line, *same)), None)
    return ExampleAccess(shown, next((f for f in found if f.kind in OUTSIDE), None))


def launch_of_root(case: Case, root: RootCause) -> LaunchMade | None:
    """The launch that a root cause is about."""
    if root.place is None:
        return None
    return next((use for use in case.launches if use.place == root.place), None)


def tensor_of_finding(case: Case, root: RootCause, finding: Finding) -> TensorRecord | None:
    """The tensor that a finding's access aims at."""
    use = launch_of_root(case, root)
    if use is None or finding.argument is None:
        return None
    return case.tensor_of(use.launch, finding.argument)


def address_of_finding(case: Case, root: RootCause, finding: Finding) -> tuple[int, int] | None:
    """Where an access goes, and how many bytes of an element are there; None where unknown."""
    tensor = tensor_of_finding(case, root, finding)
    if tensor is None or finding.number is None:
        return None
    name = tensor.dtype.upper()
    width = DType[name].block_bytes if name in DType.__members__ else 1
    return tensor.address + finding.number * width, width


def _replay_findings(case: Case, place: Place) -> tuple[Finding, ...]:
    """What a replay of the launch finds; nothing where it cannot or may not be run."""
    plan = case.plan_of(place)
    if place.plan != OUTSIDE_PLANS and (plan is None or place.launch >= len(plan.launches)):
        return ()
    try:
        from hypocenter.replay.recorded import replay_place

        report = replay_place(
            case.index,
            place,
            text=KernelText(case.allow_source),
            schedule=Schedule(budget_seconds=_SECONDS),
        )
    except (HypoError, MissingPackage, ImportError):
        return ()
    return report.findings
