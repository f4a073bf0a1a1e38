"""Findings and headroom as text, for everything that shows them; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypocenter.base.wording import count_text
from hypocenter.replay.findings import AXES, Finding, FindingKind, Headroom


def finding_text(finding: Finding, configurations: Sequence[str] = ()) -> str:
    """Several lines: what and where, then the example lane, its values, and who launched it."""
    what = f"{finding.kind}: {_of_what(finding)}"
    if not finding.sites:
        place = finding.launched_at
        lines = [f"{place.file}:{place.line}: {what}" if place else what]
    else:
        lines = [f"{finding.file}:{finding.line}: {what}", f"    {finding.sites[0].expression}"]
    lines.append(f"    {_where(finding)}{finding.detail}")
    if finding.values:
        lines.append(f"    {values_text(finding.values)}")
    if finding.layout is not None:
        how = "expanded" if finding.layout.is_expanded else "not contiguous"
        lines.append(
            f"    {finding.argument} is {how}: shape {finding.layout.shape}, strides "
            f"{finding.layout.strides}"
        )
    if finding.threshold is not None and finding.axis is not None and finding.origin is not None:
        lines.append(
            f"    {finding.origin.expression} ({finding.origin.file}:{finding.origin.line}) "
            f"overflows from program {AXES[finding.axis]} = {finding.threshold} on"
        )
    for site in finding.sites[1:]:
        lines.append(f"    called at {site.file}:{site.line} in {site.function}: {site.expression}")
    if finding.num_programs:
        lanes = f"{count_text(finding.num_lanes, 'lane')} in " if finding.num_lanes else "in "
        lines.append(f"    {lanes}{count_text(finding.num_programs, 'program')}")
    for name in configurations or [finding.configuration or ""]:
        if name:
            lines.append(f"    configuration {name}")
    if finding.sites and finding.launched_at is not None:
        lines.append(f"    launched at {finding.launched_at.file}:{finding.launched_at.line}")
    # A name of a bundle's may hold a line end, and no line of it may pass for one of ours.
    return "\n".join(line.replace("\n", "\\n") for line in lines)


def _of_what(finding: Finding) -> str:
    """`load of x_ptr in add`; of a whole launch what that did, or left undone."""
    if finding.operation == "order":
        return f"{finding.argument}, by {finding.kernel}" if finding.argument else finding.kernel
    if finding.operation == "launch":
        whose = f"{finding.argument}, by " if finding.argument else ""
        return f"{whose}this launch of {finding.kernel}"
    of = f" of {finding.argument}" if finding.argument else ""
    return f"{finding.operation}{of} in {finding.kernel}"


#: What is told of these names the element itself.
_WITH_PLACE = (FindingKind.NEVER_WRITTEN, FindingKind.UNINITIALISED_READ)


def place_text(finding: Finding, *, is_named: bool = False) -> str:
    """What is told of the place; without the argument's name where that was said (`is_named`)."""
    name = finding.argument or ""
    if finding.kind in _WITH_PLACE:
        return finding.detail if is_named else f"{name}: {finding.detail}"
    place = f"[{', '.join(map(str, finding.element))}]" if finding.element else ""
    detail = "" if finding.detail == place else finding.detail  # which may name the element alone
    return f"{name}{place} {detail}".strip()


def extent_text(finding: Finding) -> str:
    """`24 accesses in 1 program; `, or nothing: of what was never written there is no access."""
    if not finding.num_programs:
        return ""
    accesses = count_text(finding.num_lanes, "access", "accesses")
    return f"{accesses} in {count_text(finding.num_programs, 'program')}; "


def values_text(values: dict[str, Any]) -> str:
    shown = (f"{n}={v:.6g}" if isinstance(v, float) else f"{n}={v}" for n, v in values.items())
    return ", ".join(shown)


def headroom_text(spare: Headroom) -> str:
    axis = AXES[spare.axis]
    if spare.origin is None:
        return f"{spare.kernel}: not searched to the end along {axis}: {spare.gave_up}"
    return (
        f"{spare.kernel}: {spare.origin.expression} ({spare.origin.file}:{spare.origin.line}) "
        f"overflows int32 from program {axis} = {spare.threshold} on; "
        f"there are {spare.num_programs}"
    )


def _where(finding: Finding) -> str:
    if finding.program is None:
        return ""
    lane = f" lane {_tuple(finding.lane)}" if finding.lane else ""
    return f"program {_tuple(finding.program)}{lane}: "


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"
