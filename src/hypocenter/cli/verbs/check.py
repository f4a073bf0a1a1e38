"""`hypo check`: prints what `check/check.py` found in a file's Triton launches."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from hypocenter.base.errors import EXIT_GATE, HypoError, UsageError
from hypocenter.check import check as checker
from hypocenter.check.machine.file_kinds import is_machine_file
from hypocenter.check.report import CheckReport, report_text
from hypocenter.cli.output import say, show, show_json
from hypocenter.device.amd.targets import EXECUTED
from hypocenter.device.limits import named_archs

MAX_BUDGET_SECONDS = 1e6
#: A file that takes longer gets a line that says what is being done.
PATIENCE_SECONDS = 2.0


def check(
    target: str,
    arguments: Sequence[str],
    archs: str,
    budget_seconds: float,
    *,
    on: str = "",
    as_json: bool,
    show_all: bool = False,
) -> None:
    """Print the report; leaves with EXIT_GATE when there are findings.

    Raises UsageError, and HypoError when the file failed before it was done.
    """
    if not 0 < budget_seconds <= MAX_BUDGET_SECONDS:
        raise UsageError(
            f"--budget is {budget_seconds}, but must be above 0 and at most {MAX_BUDGET_SECONDS:g}"
        )
    path, kernel = split_target(target)
    if on and is_machine_file(path):
        if arguments:
            raise UsageError(f"{path} takes no arguments; its launches have theirs")
        if kernel is not None:
            raise UsageError(f"{target}: leave :{kernel} out; the launches of {path} name kernels")
        from hypocenter.check.machine.check_file import check_machine

        with _saying_if_slow(f"running {path} on an emulated GPU, every access checked ..."):
            report = check_machine(path, executed_archs(on), budget_seconds)
        _print_report(report, as_json=as_json, show_all=show_all)
        return
    if is_machine_file(path):
        raise UsageError(f"{path} holds AMD's code: say on which target, as --on gfx942")
    asked = executed_archs(on) if on else named_archs(archs)
    with _saying_if_slow(f"running {path} on the CPU, every access checked ..."):
        report = checker.check(
            path,
            kernel=kernel,
            arguments=arguments,
            archs=asked,
            budget_seconds=budget_seconds,
            is_executed=bool(on),
        )
    _print_report(report, as_json=as_json, show_all=show_all)


def executed_archs(on: str) -> list[str]:
    """The targets of --on; raises UsageError for one whose code is not executed."""
    found = named_archs(on)
    for arch in found:
        if arch not in EXECUTED:
            raise UsageError(f"--on {arch}: machine code is executed for {', '.join(EXECUTED)}")
    return found


def _print_report(report: CheckReport, *, as_json: bool, show_all: bool) -> None:
    path = report.path
    if as_json:
        show_json(report)
    else:
        show(report_text(report, show_all=show_all))
    if report.findings:
        if report.error:
            say(f"{path} did not run to its end: {report.error}")
        sys.exit(EXIT_GATE)
    if report.error:
        raise HypoError(f"{path} did not run to its end: {report.error}")


@contextlib.contextmanager
def _saying_if_slow(sentence: str) -> Iterator[None]:
    """A line and no bar: the file's own output is on stderr as well."""
    timer = threading.Timer(PATIENCE_SECONDS, say, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def split_target(target: str) -> tuple[Path, str | None]:
    """`FILE.py:kernel` or `FILE.py` as path and kernel name."""
    name, colon, kernel = target.rpartition(":")
    if not colon or Path(target).is_file():
        return Path(target), None
    if not kernel.isidentifier():
        raise UsageError(f"{target!r}: what follows the colon is not the name of a kernel")
    return Path(name), kernel
