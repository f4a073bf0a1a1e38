"""`hypo check`: runs a file in a process of its own and collects what its launches showed.

Executes the file, with the rights of the caller. Prints nothing.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from hypocenter.base import package
from hypocenter.base.errors import HypoError, UsageError
from hypocenter.base.own_folder import own_folder
from hypocenter.check.report import (
    EMULATED,
    CheckedLaunch,
    CheckReport,
    merge_findings,
    merge_headroom,
)
from hypocenter.check.runtime import CheckRequest, End, Line
from hypocenter.replay.findings import Finding, Headroom

#: Bounds of what a checked process may hand back; it runs somebody's code.
_MAX_LINE_BYTES = 1 << 20
_MAX_LINES = 1_000_000


def check(
    path: Path,
    *,
    kernel: str | None,
    arguments: Sequence[str],
    archs: Sequence[str],
    budget_seconds: float,
    is_executed: bool = False,
) -> CheckReport:
    """Execute `path` with `arguments`, as on a GPU of each of `archs`, one after another.

    With `is_executed` each launch is also executed as machine code of those GPUs, which are AMD's.
    Reports on `kernel`, or on all. Each GPU gets an equal part of the budget. The program's own
    output goes to stderr. Raises UsageError (no such file, a kernel that was not launched) and
    HypoError (the process died, or launched nothing).
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    requests = [
        CheckRequest(str(path), list(arguments), arch, budget_seconds / len(archs), "", is_executed)
        for arch in archs
    ]
    runs = [_run(request) for request in requests]
    launches = tuple(launch for run in runs for launch in run.launches)
    errors = {run.arch: run.error for run in runs if run.error is not None}
    findings = merge_findings({run.arch: run.findings for run in runs})
    if not _of(kernel, findings):
        _refuse_empty_check(path, kernel, launches, errors)
    return CheckReport(
        str(path),
        tuple(archs),
        _of(kernel, findings),
        _of(kernel, merge_headroom(run.headroom for run in runs)),
        _of(kernel, launches),
        _error_text(errors, len(archs)),
        (EMULATED,) if is_executed else (),
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """What the program did as on one GPU."""

    arch: str
    launches: tuple[CheckedLaunch, ...]
    findings: tuple[Finding, ...]
    headroom: tuple[Headroom, ...]
    error: str | None


def _run(asked: CheckRequest) -> _Run:
    with own_folder("hypo-check-") as folder:
        report = folder / "report.jsonl"
        report.touch(mode=0o600)
        request = msgspec.structs.replace(asked, report=str(report))
        done = subprocess.run(
            [*package.module_command("hypocenter.check.runtime"), msgspec.json.encode(request)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            check=False,
        )
        lines = _lines(report)
    end = next((line.end for line in lines if line.end is not None), None)
    if end is None:
        end = End(_death(done.returncode), 1)
    launches = (line.launch for line in lines if line.launch is not None)
    findings = tuple(line.finding for line in lines if line.finding is not None)
    headroom = tuple(line.headroom for line in lines if line.headroom is not None)
    named = tuple(msgspec.structs.replace(launch, arch=asked.arch) for launch in launches)
    return _Run(asked.arch, named, findings, headroom, end.error)


def _error_text(errors: Mapping[str, str], num_archs: int) -> str | None:
    """Why the program ended early, and as on which GPUs, where not on all for the same reason."""
    if len(errors) == num_archs and len(set(errors.values())) == 1:
        return next(iter(errors.values()))
    return "; ".join(f"as on {arch}: {error}" for arch, error in errors.items()) or None


_Record = TypeVar("_Record", CheckedLaunch, Finding, Headroom)


def _of(kernel: str | None, records: tuple[_Record, ...]) -> tuple[_Record, ...]:
    return tuple(record for record in records if kernel in (None, record.kernel))


def _refuse_empty_check(
    path: Path,
    kernel: str | None,
    launches: tuple[CheckedLaunch, ...],
    errors: Mapping[str, str],
) -> None:
    """Refuse to call a check clean that has looked at nothing."""
    names = sorted({launch.kernel for launch in launches})
    if kernel is not None and kernel not in names and not errors:
        near = difflib.get_close_matches(kernel, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it launched {', '.join(names) or 'none'}"
        raise UsageError(f"{path} launched no kernel {kernel!r}; {hint}")
    if not names and not errors:
        raise HypoError(
            f"{path} launched no Triton kernel, so there is nothing to check; add the launch, for "
            'instance under `if __name__ == "__main__":`'
        )


def _lines(report: Path) -> list[Line]:
    lines = []
    with report.open("rb") as stream:
        for _ in range(_MAX_LINES):
            raw = stream.readline(_MAX_LINE_BYTES)
            if not raw.endswith(b"\n"):  # the end, or a line that its process could not finish
                break
            lines.append(msgspec.json.decode(raw, type=Line))
    return lines


def _death(returncode: int) -> str:
    if returncode < 0:
        return f"the checked process was ended by signal {-returncode}"
    return f"the checked process ended with code {returncode} and no report"
