"""Findings, headroom and check reports as text; decides nothing.

`finding_text` serves everything that shows a Finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from hypocenter.records import CheckedLaunch, CheckReport, Finding, Headroom

_AXES = "xyz"


def finding_text(finding: Finding, configurations: Sequence[str] = ()) -> str:
    """Several lines: what and where, then the example lane, its values, and who launched it."""
    of = f" of {finding.argument}" if finding.argument else ""
    what = f"{finding.kind}: {finding.operation}{of} in {finding.kernel}"
    if not finding.sites:
        place = finding.launched_at
        lines = [f"{place.file}:{place.line}: {what}" if place else what]
    else:
        lines = [f"{finding.file}:{finding.line}: {what}", f"    {finding.sites[0].expression}"]
    lines.append(f"    {_where(finding)}{finding.detail}")
    if finding.values:
        lines.append(f"    {values_text(finding.values)}")
    if finding.threshold is not None and finding.axis is not None and finding.origin is not None:
        lines.append(
            f"    {finding.origin.expression} ({finding.origin.file}:{finding.origin.line}) "
            f"overflows from program {_AXES[finding.axis]} = {finding.threshold} on"
        )
    for site in finding.sites[1:]:
        lines.append(f"    called at {site.file}:{site.line} in {site.function}: {site.expression}")
    if finding.num_programs:
        lanes = f"{_count(finding.num_lanes, 'lane')} in " if finding.num_lanes else "in "
        lines.append(f"    {lanes}{_count(finding.num_programs, 'program')}")
    for name in configurations or [finding.configuration or ""]:
        if name:
            lines.append(f"    configuration {name}")
    if finding.sites and finding.launched_at is not None:
        lines.append(f"    launched at {finding.launched_at.file}:{finding.launched_at.line}")
    return "\n".join(lines)


def values_text(values: dict[str, Any]) -> str:
    shown = (f"{n}={v:.6g}" if isinstance(v, float) else f"{n}={v}" for n, v in values.items())
    return ", ".join(shown)


def headroom_text(spare: Headroom) -> str:
    axis = _AXES[spare.axis]
    if spare.origin is None:
        return f"{spare.kernel}: not searched to the end along {axis}: {spare.gave_up}"
    return (
        f"{spare.kernel}: {spare.origin.expression} ({spare.origin.file}:{spare.origin.line}) "
        f"overflows int32 from program {axis} = {spare.threshold} on; "
        f"there are {spare.num_programs}"
    )


def report_text(report: CheckReport) -> str:
    """The whole report: findings, then coverage, then the int32 headroom."""
    parts = [finding_text(first, names) for first, names in _grouped(report.findings)]
    lines = ["\n\n".join(parts), ""] if parts else []
    lines += list(_coverage(report.launches)) if report.launches else []
    if report.headroom:
        lines += ["int32 headroom (no finding)"]
        lines += [f"    {headroom_text(spare)}" for spare in report.headroom]
    num = len(parts)
    launches = [launch for launch in report.launches if launch.skipped is None]
    kernels = len({launch.kernel for launch in launches})
    if report.error and not launches:
        lines.append("nothing was checked: the file ended before its first launch")
    else:
        cut = "; the file did not run to its end, so later launches are missing"
        lines.append(
            f"{_count(num, 'finding')} in {_count(len(launches), 'launch', 'launches')} of "
            f"{_count(kernels, 'kernel')}, as on {report.arch}{cut if report.error else ''}"
        )
    return "\n".join(lines)


def _grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
    """Findings of one place with the configurations that have it, in order of appearance."""
    groups: dict[Any, tuple[Finding, list[str]]] = {}
    for finding in findings:
        place = finding.sites[0] if finding.sites else finding.launched_at
        key = (finding.kind, finding.kernel, finding.operation, finding.argument, place)
        names = groups.setdefault(key, (finding, []))[1]
        if finding.configuration:
            names.append(finding.configuration)
    return list(groups.values())


def _coverage(launches: Sequence[CheckedLaunch]) -> Iterable[str]:
    """One line per kernel and configuration: launches, and programs run of those launched."""

    def key(launch: CheckedLaunch) -> tuple[str, str]:
        return launch.kernel, launch.configuration or ""

    yield "coverage"
    for (kernel, configuration), same in groupby(sorted(launches, key=key), key):
        group = list(same)
        name = f"{kernel} ({configuration})" if configuration else kernel
        if skipped := [launch.skipped for launch in group if launch.skipped]:
            yield f"    {name}: does not compile: {skipped[0]}"
            continue
        num_run = sum(launch.coverage.num_run for launch in group)
        num_launched = sum(launch.coverage.num_launched for launch in group)
        sampled = " (sampled; --budget SECONDS runs more)" if num_run < num_launched else ""
        if any(0 in launch.grid for launch in group):
            sampled += " (an empty grid: nothing ran)"
        yield (
            f"    {name}: {_count(len(group), 'launch', 'launches')}, "
            f"{num_run} of {num_launched} programs{sampled}"
        )


def _where(finding: Finding) -> str:
    if finding.program is None:
        return ""
    lane = f" lane {_tuple(finding.lane)}" if finding.lane else ""
    return f"program {_tuple(finding.program)}{lane}: "


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
