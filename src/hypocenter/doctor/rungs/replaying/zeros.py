"""Tensors that a replay had as zeros though a kernel takes addresses from them; no rung of its own.

Of a program that is not this package's most contents are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import WITH_VALUES
from hypocenter.doctor.kernel_text import follows_what_it_loads, is_index_in
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.gap import Gap, GapKind
from hypocenter.replay.findings import Finding


def replayed_as_zeros(case: Case, use: LaunchMade) -> list[str]:
    """Tensors of a program's own launch that lead to addresses, and whose contents are unknown."""
    if not case.is_foreign:
        return []
    source = case.sources.get(use.launch.source)
    return [
        name
        for name, tensor in case.tensors_of(use.launch).items()
        if case.index.values_of(tensor.id, use.seq) is None
        and (source is None or follows_what_it_loads(source, case.parameter_of(use.launch, name)))
    ]


def zeros_gap(case: Case, use: LaunchMade, name: str) -> Gap:
    tensor = case.tensor_of(use.launch, name)
    size = f"its {tensor.extent_bytes:,} bytes" if tensor else "what it held"
    reason = f"it was replayed as zeros, for {size} were not recorded; {WITH_VALUES}"
    return Gap(GapKind.ZEROS, f"{name} of {use.launch.kernel}", reason)


def zeros_behind(case: Case, use: LaunchMade, finding: Finding) -> str:
    """The tensor replayed as zeros from which the address of a finding is worked out."""
    source = case.sources.get(use.launch.source)
    access = finding.sites[-1].expression if finding.sites else ""
    found = (
        zeros_gap(case, use, name).what
        for name in replayed_as_zeros(case, use)
        if source and is_index_in(source, access, case.parameter_of(use.launch, name))
    )
    return next(found, "")


def doubts(case: Case, use: LaunchMade) -> Iterator[str]:
    """Why a clean replay of a program's own launch refutes nothing."""
    if not case.is_foreign:
        return
    launch = use.launch
    if case.kind in ("crash", "error") and use.seq == case.launches[-1].seq:
        yield f"{launch.kernel} was the last launch before the end"
    if unknown := replayed_as_zeros(case, use):
        yield (
            f"{launch.kernel} works out addresses, masks or branches from {', '.join(unknown)}, "
            "whose contents were not recorded: zeros stood in for them"
        )
