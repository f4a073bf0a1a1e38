"""`hypo check --on` for HIP sources and code objects: the report of their launches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypocenter.base.errors import UsageError
from hypocenter.check.machine.file_kinds import LAUNCHES
from hypocenter.check.machine.launch import MachineReport
from hypocenter.check.machine.launch_file import run_launch_file
from hypocenter.check.report import EMULATED, CheckReport, merge_findings


def check_machine(path: Path, archs: Sequence[str], budget_seconds: float) -> CheckReport:
    """Run the launches of a file as code of each of `archs`; raises UsageError, BadCodeObject.

    The launches of a source or an object are those of the TOML file of its name beside it.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    launches = path if path.suffix == LAUNCHES else path.with_suffix(LAUNCHES)
    code = None if path.suffix == LAUNCHES else path
    share = budget_seconds / len(archs)
    reports = {arch: run_launch_file(launches, arch, share, code) for arch in archs}
    return report_of(str(path), reports)


def report_of(path: str, reports: dict[str, list[MachineReport]]) -> CheckReport:
    """The launches of each target as one report."""
    found = {arch: [f for report in of for f in report.findings] for arch, of in reports.items()}
    notes = dict.fromkeys(
        f"{report.launch.kernel}: {what}"
        for of in reports.values()
        for report in of
        for what in (*report.untested, *report.notes)
    )
    launches = tuple(report.launch for of in reports.values() for report in of)
    return CheckReport(
        path, tuple(reports), merge_findings(found), (), launches, None, (*notes, EMULATED)
    )
