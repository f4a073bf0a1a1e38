"""What a checked file did: its launches and what was found in them, and that as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from hypocenter.replay.findings import Coverage, Finding, Headroom, Site
from hypocenter.replay.text import finding_text, headroom_text
from hypocenter.wording import count_text


class CheckedLaunch(msgspec.Struct, frozen=True):
    """A launch that a checked program made: which kernel, from where, and how much was run."""

    kernel: str
    grid: tuple[int, int, int]
    coverage: Coverage
    launched_at: Site | None
    configuration: str | None = None
    #: Why this configuration does not compile (a static_assert); nothing was run then.
    skipped: str | None = None
    #: Why the Triton that is installed does not compile this kernel, though it was run here.
    problem: str = ""


class CheckReport(msgspec.Struct, frozen=True):
    """What a checked program did; `error` says why it ended early, if it did."""

    path: str
    arch: str
    findings: tuple[Finding, ...]
    headroom: tuple[Headroom, ...]
    launches: tuple[CheckedLaunch, ...]
    error: str | None


def report_text(report: CheckReport) -> str:
    """The whole report: findings, then coverage, then the int32 headroom."""
    parts = [finding_text(first, names) for first, names in _group_by_place(report.findings)]
    lines = ["\n\n".join(parts), ""] if parts else []
    lines += list(_coverage(report.launches)) if report.launches else []
    problems = {launch.kernel: launch.problem for launch in report.launches if launch.problem}
    lines += ["does not compile here (no finding)"] if problems else []
    lines += [f"    {kernel}: {problem}" for kernel, problem in problems.items()]
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
            f"{count_text(num, 'finding')} in {count_text(len(launches), 'launch', 'launches')} of "
            f"{count_text(kernels, 'kernel')}, as on {report.arch}{cut if report.error else ''}"
        )
    return "\n".join(lines)


def _group_by_place(findings: Iterable[Finding]) -> list[tuple[Finding, list[str]]]:
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
            f"    {name}: {count_text(len(group), 'launch', 'launches')}, "
            f"{num_run} of {num_launched} programs{sampled}"
        )
