"""`hypo guard`: runs a command with its Triton launches guarded, and prints what they refused."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from hypocenter.base import package
from hypocenter.base.errors import EXIT_ERROR, EXIT_GATE, EXIT_OK, UsageError
from hypocenter.cli.child_run import (
    ending_on_signals,
    environment_of,
    exit_code,
    how,
    pass_on,
    say_armed,
)
from hypocenter.cli.output import say, show, show_json
from hypocenter.doctor.guard_findings import GuardFinding, guard_findings
from hypocenter.doctor.guard_report import (
    GuardReport,
    kernels_of,
    once_per_site,
    report_text,
    summary,
    unseen_rows,
)
from hypocenter.record import ring
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import RanUnguarded
from hypocenter.record.gap import Gap
from hypocenter.settings.environment import Environment
from hypocenter.watch import collect, dead_runs, foreign_runs
from hypocenter.watch.child import Ended, watch


def guard(words: Sequence[str], verbs: Collection[str], *, as_json: bool) -> None:
    """Run the command behind `--`; leaves with EXIT_GATE when an access was wrong.

    Else it leaves with the command's own exit code. Raises UsageError for what cannot be run.
    """
    command = _command_of(words, verbs)
    base = Environment.read().run_dir
    with ending_on_signals(), dead_runs.watched_runs(base) as runs:
        environment = environment_of(runs, is_own=False, is_guarded=True)
        # The report is all that stdout has, where a program reads it.
        stdout = sys.stderr.fileno() if as_json else None
        say_armed(environment)
        ended = watch(command, environment, runs, pass_on, stdout=stdout)
        # With it Triton has its interpreter where a replay has its own; the command has had it.
        os.environ.pop("TRITON_INTERPRET", None)
        report = _report(ended, runs)
    if as_json:
        show_json(report)
    elif report.findings or report.unguarded:
        show(report_text(report))
    _leave(report, ended)


def _command_of(words: Sequence[str], verbs: Collection[str]) -> list[str]:
    if not words or words[0] != "--":
        raise UsageError("put the command behind --: hypo guard -- python train.py")
    command = list(words[1:])
    if not command:
        raise UsageError("no command stands behind --")
    own = package.place_of_own_name(command)
    if command[0] in verbs or own is not None:
        raise UsageError(
            "hypo guard is for programs that are not hypocenter's; its own engine has "
            "--launch-mode guarded"
        )
    if not Environment.read().record:
        raise UsageError("HYPO_RECORD=0 switches off what a guarded run stands on; unset it")
    return command


def _report(ended: Ended, runs: Path) -> GuardReport:
    """What all processes of the command left."""
    bundles = [(run, collect.bundle_of_run(run)) for run in collect.runs_below(runs)]
    findings: list[GuardFinding] = []
    unguarded: list[RanUnguarded] = []
    unseen: list[Gap] = [*foreign_runs.notes(runs)]
    num_launches = num_guarded = num_seen = 0
    for run, bundle in bundles:
        num_of_run = foreign_runs.num_launches(run)
        num_seen += bool(num_of_run)
        num_launches += num_of_run
        num_guarded += sum(check.num_runs for check in run.checks if check.name == "guard")
        unguarded += [event for event in run.events if isinstance(event, RanUnguarded)]
        findings += _findings_of(run, bundle)
        unseen += (*run.missing, *unseen_rows(bundle.tensors))
    return GuardReport(
        command=tuple(ended.command),
        exit_code=ended.exit_code,
        signal=ended.signal,
        findings=once_per_site(findings),
        unguarded=kernels_of(unguarded),
        num_launches=num_launches,
        num_guarded=min(num_guarded, num_launches),
        num_processes=num_seen,
        unseen=tuple(dict.fromkeys(unseen)),
    )


def _findings_of(run: ring.Run, bundle: Bundle) -> list[GuardFinding]:
    # The command has run its own kernels' text a moment ago; so may their replay.
    found = guard_findings(BundleIndex(bundle), allow_source=True)
    return [msgspec.structs.replace(finding, pid=run.pid) for finding in found]


def _leave(report: GuardReport, ended: Ended) -> None:
    """Leave with the code that says what was found; a guarded run that is clean says so."""
    if report.findings:
        say(how(ended))  # the report has the summary
        sys.exit(EXIT_GATE)
    if not report.num_launches:
        say(f"{how(ended)}; no Triton launch was seen, so nothing was guarded")
        # No look is no good result, whatever the command says of itself.
        sys.exit(exit_code(ended) or EXIT_ERROR)
    say(how(ended) if report.unguarded else f"{how(ended)}; {summary(report)}")
    if ended.signal == signal.SIGINT or exit_code(ended) != EXIT_OK:
        sys.exit(exit_code(ended))
