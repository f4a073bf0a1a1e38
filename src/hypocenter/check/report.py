"""What a checked file did: its launches and what was found in them, and that as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from hypocenter.base.wording import count_text
from hypocenter.replay.findings import Coverage, Finding, Headroom, Site
from hypocenter.replay.text import finding_text, headroom_text


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
    #: Why its replay came to no end, after which the file did not go on.
    stopped: str = ""
    #: As on which GPU.
    arch: str = ""
    #: Why its machine code was not executed, or not to the end, where that was asked for.
    unexecuted: str = ""


class CheckReport(msgspec.Struct, frozen=True):
    """What a checked program did; `error` says why it ended early, if it did."""

    path: str
    archs: tuple[str, ...]
    findings: tuple[Finding, ...]
    headroom: tuple[Headroom, ...]
    launches: tuple[CheckedLaunch, ...]
    error: str | None
    #: What ends the report: how it was run, and what was not.
    notes: tuple[str, ...] = ()


#: What stands under every report of machine code that was run here.
EMULATED = "executed by our emulator of the machine code; not hardware"
#: A grid that many times as large overflows int32: far enough not to be told of.
FAR = 100


def report_text(report: CheckReport, *, show_all: bool = False) -> str:
    """The report: findings, coverage, and the int32 headroom; the latter whole with `show_all`,
    otherwise where a grid less than `FAR` times as large would overflow."""
    parts = [
        "\n".join([finding_text(first, names), *_shown_on(report.archs, archs)])
        for first, names, archs in _group_by_place(report.findings)
    ]
    lines = ["\n\n".join(parts), ""] if parts else []
    lines += _coverage(report) if report.launches else []
    problems = {launch.kernel: launch.problem for launch in report.launches if launch.problem}
    lines += ["does not compile here (no finding)"] if problems else []
    lines += [f"    {kernel}: {problem}" for kernel, problem in problems.items()]
    unexecuted = {launch.kernel: launch.unexecuted for launch in report.launches}
    left = {kernel: why for kernel, why in unexecuted.items() if why}
    lines += ["not executed as machine code (no finding)"] if left else []
    lines += [f"    {kernel}: {why}" for kernel, why in left.items()]
    spares = [spare for spare in report.headroom if show_all or _is_near(spare)]
    lines += ["int32 headroom (no finding)"] if spares else []
    lines += [f"    {headroom_text(spare)}" for spare in spares]
    num = len(parts)
    launches = [launch for launch in report.launches if launch.skipped is None]
    kernels = len({launch.kernel for launch in launches})
    if report.error and not launches:
        lines.append("nothing was checked: the file ended before its first launch")
    else:
        archs = ", ".join(report.archs)
        cut = "; the file did not run to its end, so later launches are missing"
        lines.append(
            f"{count_text(num, 'finding')} in {count_text(len(launches), 'launch', 'launches')} of "
            f"{count_text(kernels, 'kernel')}, as on {archs}{cut if report.error else ''}"
        )
    lines += report.notes
    return "\n".join(lines)


def _is_near(spare: Headroom) -> bool:
    return spare.threshold is not None and spare.threshold < FAR * spare.num_programs


def merge_findings(found: Mapping[str, Sequence[Finding]]) -> tuple[Finding, ...]:
    """The findings of each GPU; one that shows as on several stands once, with their names."""
    merged: dict[Any, Finding] = {}
    for arch, findings in found.items():
        for finding in findings:
            key = (_place(finding), finding.configuration)
            first = merged.get(key, finding)
            merged[key] = msgspec.structs.replace(first, archs=(*first.archs, arch))
    return tuple(merged.values())


def merge_headroom(found: Iterable[Sequence[Headroom]]) -> tuple[Headroom, ...]:
    """The headroom of each GPU; of one place and axis the least."""
    merged: dict[Any, Headroom] = {}
    for spare in (spare for spares in found for spare in spares):
        key = (spare.kernel, spare.axis, spare.origin)
        other = merged.setdefault(key, spare)
        if (spare.threshold or 0) < (other.threshold or 0):
            merged[key] = spare
    return tuple(merged.values())


def _place(finding: Finding) -> tuple[Any, ...]:
    """What two findings have in common that are one to a reader."""
    place = finding.sites[0] if finding.sites else finding.launched_at
    return finding.kind, finding.kernel, finding.operation, finding.argument, place


def _group_by_place(
    findings: Iterable[Finding],
) -> list[tuple[Finding, list[str], dict[str, None]]]:
    """Findings of one place in order, with the configurations and the GPUs that have it."""
    groups: dict[Any, tuple[Finding, list[str], dict[str, None]]] = {}
    for finding in findings:
        _, names, archs = groups.setdefault(_place(finding), (finding, [], {}))
        if finding.configuration:
            names.append(finding.configuration)
        archs.update(dict.fromkeys(finding.archs))
    return list(groups.values())


def _shown_on(asked: Sequence[str], archs: Collection[str]) -> list[str]:
    """Of several GPUs, those as on which a finding shows, and the others."""
    if len(asked) < 2:
        return []
    others = [arch for arch in asked if arch not in archs]
    if not others:
        return [f"    shows as on {_all_text(asked)}"]
    return [f"    shows as on {', '.join(archs)}; not as on {', '.join(others)}"]


def _all_text(asked: Sequence[str]) -> str:
    return "both" if len(asked) == 2 else f"all {len(asked)}"


def _coverage(report: CheckReport) -> list[str]:
    """One line per kernel and configuration: launches, and programs run of those launched.

    Of several GPUs those that ran alike share a line.
    """

    def key(launch: CheckedLaunch) -> tuple[str, str]:
        return launch.kernel, launch.configuration or ""

    lines = ["coverage"]
    for (kernel, configuration), same in groupby(sorted(report.launches, key=key), key):
        name = f"{kernel} ({configuration})" if configuration else kernel
        group = list(same)
        told: dict[str, list[str]] = {}
        for arch in report.archs:
            if of_arch := [launch for launch in group if launch.arch == arch]:
                told.setdefault(_covered_text(of_arch), []).append(arch)
        for text, archs in told.items():
            on = "" if len(archs) == len(report.archs) else f", as on {', '.join(archs)}"
            lines.append(f"    {name}: {text}{on}")
    return lines


def _covered_text(group: Sequence[CheckedLaunch]) -> str:
    if skipped := [launch.skipped for launch in group if launch.skipped]:
        return f"does not compile: {skipped[0]}"
    num_run = sum(launch.coverage.num_run for launch in group)
    num_launched = sum(launch.coverage.num_launched for launch in group)
    num_waiting = sum(launch.coverage.num_waiting for launch in group)
    if stopped := [launch.stopped for launch in group if launch.stopped]:
        sampled = f" ({stopped[0]})"
    elif num_waiting:
        sampled = f" ({num_waiting} wait for ever)"
    else:
        sampled = " (sampled; --budget SECONDS runs more)" if num_run < num_launched else ""
    if any(0 in launch.grid for launch in group):
        sampled += " (an empty grid: nothing ran)"
    launches = count_text(len(group), "launch", "launches")
    return f"{launches}, {num_run} of {num_launched} programs{sampled}"
