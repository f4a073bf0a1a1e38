"""Makes a bundle of what a dead process left: run folder, exit, stderr, lines of the kernel's log.

Draws no conclusions.
"""

from __future__ import annotations

import contextlib
import datetime
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hypocenter.base import package
from hypocenter.base.errors import EXIT_ERROR, EXIT_FAULT, ErrorKind
from hypocenter.base.package import place_of_own_name
from hypocenter.coredump.names import source_name
from hypocenter.coredump.rocm import LOG
from hypocenter.coredump.rocm_log import launch_at_end
from hypocenter.record import ring
from hypocenter.record.bundle import Bundle
from hypocenter.record.driver_log import read_driver_log
from hypocenter.record.events import (
    AnyEvent,
    Called,
    Rejected,
)
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.gap import UNWATCHED, Gap
from hypocenter.record.gpu_stop import SanitizerReport
from hypocenter.record.logged_launch import LoggedLaunch
from hypocenter.record.module_texts import read_texts
from hypocenter.record.run_records import DeviceRecord
from hypocenter.record.trace_log import read_trace
from hypocenter.watch import foreign_runs
from hypocenter.watch.child import START_SECONDS, Ended, Shrunk
from hypocenter.watch.dead_runs import MAX_FOLDERS, DeadRun, is_watched
from hypocenter.watch.device_dump import device_dump
from hypocenter.watch.fault_text import (
    fatal_error,
    fault_in,
    innermost_call,
    is_by_hand,
    is_fault,
    signal_below,
    waiting_calls,
    with_kernel_log,
)
from hypocenter.watch.kernel_log import kernel_log
from hypocenter.watch.launcher_lines import without_prefixes
from hypocenter.watch.memory_killer import with_memory_kill
from hypocenter.watch.redact import redact

#: Of runs that died so many of the latest are asked whether they waited for another of them.
_MAX_RANKS = 8
#: Of what is not known where that cannot be read.
KERNEL_LOG = "the kernel's log"


def collect(
    runs: Path,
    ended: Ended,
    *,
    suspect: bool = False,
    with_prompts: bool = False,
    fault_before: FaultRecord | None = None,
    reports: tuple[SanitizerReport, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Bundle | None:
    """The bundle of a child that `watch` ran, whose recorders wrote below `runs`.

    None when it ended without a fault and nothing is suspected. Without `with_prompts` token ids
    and prompts are taken out. `fault_before` and `reports` are as in a Bundle; `environment` is
    that of the child, which says whether its launches were waited for.
    """
    run = main_run(runs)
    fault = _fault(ended, run)
    if fault.kind == "none" and not suspect:
        return None
    lines, problem = kernel_log(ended.since)
    lines += device_dump(ended.since)
    pid = run.pid if run and run.pid else ended.pid
    fault = with_kernel_log(fault, lines, pid)
    fault = with_memory_kill(fault, lines, pid, ended.num_memory_kills)
    missing = [Gap.not_recorded(KERNEL_LOG, problem)] if problem else []
    if run is None:
        missing.append(
            Gap.not_recorded(
                "the recorder's files",
                "the command opened no recorder, or HYPO_RECORD=0 switched it off",
            )
        )
    missing += [*foreign_runs.notes(runs), *(() if fault.kind == "none" else ended.gpu_gaps)]
    seen = Bundle(
        kind=_kind_of(fault),
        fault=fault,
        pid=pid,
        gpu_stops=ended.gpu_stops,
        cards=ended.cards,
        fault_before=fault_before,
        reports=reports,
        logged_launch=_logged_launch(runs, ended, fault, environment or {}),
        others=_other_ranks(runs, run),
        command=tuple(map(_text, ended.command)),
        started=_show(ended.started),
        ended=_show(ended.ended),
        stderr=ended.stderr,
        kernel_log=lines,
        missing=tuple(missing),
    )
    bundle = _with_run(seen, run)
    others = tuple(redact(other, with_prompts=with_prompts) for other in bundle.others)
    return msgspec.structs.replace(redact(bundle, with_prompts=with_prompts), others=others)


def _other_ranks(runs: Path, main: ring.Run | None) -> tuple[Bundle, ...]:
    """What the processes of the other ranks recorded, by their devices.

    Their modules are those of the first rank, and are not kept again.
    """
    found = [
        bundle_of_run(run)
        for run in runs_below(runs)
        if main is not None and run.folder != main.folder and _is_rank(run)
    ]
    return tuple(
        msgspec.structs.replace(bundle, modules=())
        for bundle in sorted(found, key=lambda bundle: bundle.device)
    )


def _is_rank(run: ring.Run) -> bool:
    return run.process is not None and package.RANK_MODULE in run.process.command


def most_telling(dead: Sequence[DeadRun]) -> DeadRun:
    """Of the latest run that died the process that tells most of why: ranks name each other.

    `dead` is not empty, the latest first.
    """
    last = dead[0]
    for other in dead[1:_MAX_RANKS]:
        lost = _lost_by(ring.read_run(other.folder))
        if lost == last.pid:
            last = other
            break
    lost = _lost_by(ring.read_run(last.folder))
    named = next((run for run in dead if run.pid == lost), None)
    if named is not None and _fault_of_events(ring.read_run(named.folder).events) is not None:
        return named
    return last


def collect_dead(dead: DeadRun, *, with_prompts: bool = False) -> Bundle:
    """The bundle of a run that nobody watched: how it ended is known from its events alone."""
    run = ring.read_run(dead.folder)
    fault = _fault_of_events(run.events) or FaultRecord(
        kind="crash", message="the process died; nobody saw how, for it was not run by hypo doctor"
    )
    started = _seconds(run.process.started) if run.process else dead.seconds
    lines, problem = kernel_log(time.monotonic() - (time.time() - started))
    fault = with_kernel_log(fault, lines, dead.pid)
    fault = with_memory_kill(fault, lines, dead.pid, None)
    missing = [Gap.not_recorded(KERNEL_LOG, problem)] if problem else []
    missing.append(UNWATCHED)
    seen = Bundle(
        kind=_kind_of(fault),
        fault=fault,
        pid=dead.pid,
        command=_command_of(run),
        started=run.process.started if run.process else "",
        ended=_show(dead.seconds),
        kernel_log=lines,
        missing=tuple(missing),
    )
    bundle = _with_run(seen, run)
    return redact(bundle, with_prompts=with_prompts)


def runs_below(runs: Path) -> list[ring.Run]:
    """What each process that a command started recorded, the one that began last first."""
    return [ring.read_run(folder) for folder in ring.run_folders(runs)[:MAX_FOLDERS]]


def main_run(runs: Path) -> ring.Run | None:
    """Of the processes that a command started, the one that tells most of a fault."""
    found = runs_below(runs)
    most = max(found, key=_tells, default=None)
    if most is None or not _ended_in_a_statement(most):
        return most
    # A process may have two records: of torch's and Triton's launches, and the engine's. What ended
    # a statement of the program, the engine raised, and its record has the launches behind it.
    of_engine = [run for run in found if run.pid == most.pid and run.model is not None]
    return max(of_engine, key=_tells, default=most)


def bundle_of_run(run: ring.Run) -> Bundle:
    """What one process recorded, whole and with nothing of how it ended: not to be saved."""
    fault = FaultRecord(kind="none", message="")
    started = run.process.started if run.process else ""
    seen = Bundle(kind=_kind_of(fault), fault=fault, command=_command_of(run), started=started)
    return _with_run(seen, run)


def _tells(run: ring.Run) -> tuple[int, bool, bool, int]:
    """A fault of its own tells more than the end of another process, and that more than none."""
    spoke = _fault_of_events(run.events) is not None
    of_its_own = spoke and _lost_by(run) is None
    return (
        spoke + of_its_own,
        not run.is_clean,
        run.progress.submitted is not None,
        len(run.events),
    )


def _ended_in_a_statement(run: ring.Run) -> bool:
    fault = _fault_of_events(run.events)
    return fault is not None and fault.is_statement


def _lost_by(run: ring.Run) -> int | None:
    """The process whose end is all that this one has to report."""
    calls = (event for event in run.events if isinstance(event, Called))
    first = next(calls, None)
    return first.lost.process if first is not None and first.lost is not None else None


def _kind_of(fault: FaultRecord) -> str:
    """The kind of a bundle."""
    return {"none": "suspect", "crash": "crash", "hang": "hang"}.get(fault.kind, "error")


def _command_of(run: ring.Run) -> tuple[str, ...]:
    return tuple(map(_text, run.process.command)) if run.process else ()


def _with_run(bundle: Bundle, run: ring.Run | None) -> Bundle:
    """A bundle of how a process ended, and all that the process has recorded."""
    missing = [*bundle.missing]
    if run is not None:
        device, trace = _device(run), read_trace(run.folder)
        modules, changed = read_texts(run.modules)
        driver_run, damaged = read_driver_log(run.folder, source_name)
        bundle = msgspec.structs.replace(
            bundle,
            device=device.name if device else "",
            limits=device.limits if device else None,
            sees_reads=any(device.sees_reads for device in run.devices),
            environment=dict(run.process.environment) if run.process else {},
            packages=run.process.packages if run.process else {},
            python=run.process.python if run.process else "",
            platform=run.process.platform if run.process else "",
            driver=run.process.driver if run.process else None,
            model=run.model,
            progress=run.progress,
            tensors=run.tensors,
            plans=run.plans,
            sources=run.sources,
            contracts=run.contracts,
            modules=modules,
            events=run.events,
            checks=run.checks,
            statistics=trace.statistics,
            snapshots=trace.snapshots,
            outcomes=trace.outcomes,
            driver_run=driver_run,
        )
        missing += [*run.missing, *trace.missing, *changed, *damaged]
        missing += foreign_runs.unseen(run, driver_run)
        if is_watched(run.folder.parent):  # where the doctor had it recorded says nothing
            bundle.environment.pop("HYPO_RUN_DIR", None)
    # A program may run in an installation that has none of this package, which recorded it.
    packages = {package.NAME: package.version(), **bundle.packages}
    bundle = msgspec.structs.replace(bundle, packages=packages)
    return msgspec.structs.replace(bundle, missing=tuple(missing), redacted=False)


def _logged_launch(
    runs: Path, ended: Ended, fault: FaultRecord, environment: Mapping[str, str]
) -> LoggedLaunch | None:
    """The launch that ROCm's log ends in, of a command that a fault or a wait without end ended."""
    if fault.kind not in ("crash", "error", "hang"):
        return None
    return launch_at_end(sorted(runs.glob(f"{LOG}_*")), without_prefixes(ended.stderr), environment)


def _device(run: ring.Run) -> DeviceRecord | None:
    """That of the launch that was submitted last, else the one that was opened last."""
    place = run.progress.submitted
    names = {plan.device for plan in run.plans if place and plan.id == place.plan}
    of_plan = [device for device in run.devices if device.name in names]
    opened = of_plan or run.devices
    return opened[-1] if opened else None


def _fault(ended: Ended, run: ring.Run | None) -> FaultRecord:
    if ended.enough:
        message = f"{ended.enough}, and the command was ended"
        return FaultRecord(kind="error", message=message, exit_code=ended.exit_code)
    if ended.is_damaged:
        fault = fault_in(ended.stderr, ended.exit_code, ended.signal)
        return msgspec.structs.replace(
            fault,
            kind="crash",
            message=f"its own memory was damaged, as it said; then it did nothing for "
            f"{ended.hung_seconds or 0.0:.0f} seconds, and was ended",
        )
    if ended.hung_seconds is not None:
        fault = fault_in(ended.stderr, ended.exit_code, ended.signal)
        return msgspec.structs.replace(
            fault,
            kind="hang",
            is_asynchronous=True,
            address=None,
            address_bytes=1,
            error="",
            call=innermost_call(ended.stderr),
            waiting=waiting_calls(ended.stderr) if ended.is_idle else (),
            message=(
                f"no step or launch had begun for {ended.hung_seconds:.0f} seconds, and the "
                f"command was ended{_of_start(ended)}"
                if ended.is_idle
                else f"a step or launch had been running for {ended.hung_seconds:.0f} seconds, "
                "and was ended"
            ),
        )
    below = signal_below(ended.exit_code)
    of_events = _fault_of_events(run.events if run else ())
    code = ended.exit_code
    if code == EXIT_FAULT and not _is_ours(ended, run):
        code = EXIT_ERROR  # what 3 means is for the program to say: pytest and curl have it too
    spoke = is_fault(ended.stderr, code, ended.signal or below)
    if not spoke and run is not None and _has_died(ended, run):
        return _fault_below(ended, run)
    if not spoke and (hidden := _hidden_by_program(ended)) is not None:
        return hidden
    if not spoke and (of_events is None or not ended.exit_code):
        return FaultRecord(kind="none", message="", exit_code=ended.exit_code, signal=ended.signal)
    fault = fault_in(ended.stderr, ended.exit_code, ended.signal or below)
    if fault.signal == signal.SIGBUS and ended.shrunk:
        return msgspec.structs.replace(fault, message=_shrunk_text(ended.shrunk))
    if of_events is not None and of_events.call and fault.refusal is not None:
        # One line of a program has two names where a package of others made the call.
        return msgspec.structs.replace(
            fault, call=of_events.call, is_statement=of_events.is_statement
        )
    if of_events is not None and fault.kind == "error" and not fault.call:
        fault = msgspec.structs.replace(
            fault,
            call=of_events.call,
            error=fault.error or of_events.error,
            kernel=of_events.kernel,
            is_statement=of_events.is_statement,
            error_kind=_told_apart(fault.error_kind, of_events.error_kind),
            is_asynchronous=of_events.is_asynchronous,
        )
    return fault


def _of_start(ended: Ended) -> str:
    """That a command has some time to begin with, whatever its deadline."""
    if ended.has_begun:
        return ""
    return f" (until its first one a command has {START_SECONDS:.0f} seconds at least)"


def _hidden_by_program(ended: Ended) -> FaultRecord | None:
    """A fault of a GPU that left a dump, of which the command itself said nothing."""
    if is_by_hand(ended.exit_code, ended.signal):
        return None
    for stop in ended.gpu_stops:
        if stop.exception:
            kernel = stop.faulting.kernel if stop.faulting else ""
            return FaultRecord(
                kind="error",
                message=f"the GPU stopped at a fault ({stop.exception}) in {kernel or 'a kernel'}, "
                f"of which the command said nothing: it ended with exit code {ended.exit_code}",
                kernel=kernel,
                error=stop.exception,
                error_kind=ErrorKind.FOUND_LATER,
                exit_code=ended.exit_code,
                signal=ended.signal,
            )
    return None


def _shrunk_text(files: Sequence[Shrunk]) -> str:
    lost = "; ".join(
        f"{file.path.name} became shorter while it was open, from {file.before_bytes:,} to "
        f"{file.now_bytes:,} bytes"
        for file in files
    )
    return f"ended by SIGBUS: {lost}; get the file again, and move a new one to its place"


def _is_ours(ended: Ended, run: ring.Run | None) -> bool:
    """Whether it was a command of this package that ended, or an engine below it that ran."""
    commands = [ended.command, *([run.process.command] if run and run.process else [])]
    has_plans = run is not None and bool(run.plans)
    return has_plans or any(place_of_own_name(command) is not None for command in commands)


def _told_apart(of_stderr: ErrorKind, of_events: ErrorKind) -> ErrorKind:
    return of_events if of_stderr is ErrorKind.OTHER else of_stderr


def _has_died(ended: Ended, run: ring.Run) -> bool:
    """Whether a process below the command died, though the command's own end does not tell.

    A process may leave without a word on purpose, so a command that is content is believed unless
    Python wrote why it died.
    """
    by_hand = is_by_hand(ended.exit_code, ended.signal) or ring.was_by_hand(run.folder)
    if run.has_left or run.is_alive or by_hand:
        return False
    is_the_command = run.pid == ended.pid  # whose end is known
    return not is_the_command and bool(ended.exit_code or fatal_error(ended.stderr))


def _fault_below(ended: Ended, run: ring.Run) -> FaultRecord:
    said = fatal_error(ended.stderr)
    fault = fault_in(ended.stderr, ended.exit_code or 1, None)
    told = _fault_of_events(run.events)
    why = f"of {said!r}" if said else "without a word"
    if not said and told is not None:
        why = f"after it recorded: {told.message}"
    return msgspec.structs.replace(
        fault,
        kind="crash",
        exit_code=ended.exit_code,
        is_asynchronous=True,
        message=f"process {run.pid} of the command died {why}; "
        f"the command itself ended with exit code {ended.exit_code}",
    )


def _fault_of_events(events: Sequence[AnyEvent]) -> FaultRecord | None:
    """The first call that reported an error, or the last refusal."""
    for event in events:
        if isinstance(event, Called):
            return FaultRecord(
                kind="error",
                message=": ".join(filter(None, (event.call, event.outcome))),
                call=event.call,
                kernel=event.kernel,
                is_statement=event.is_statement,
                error=event.outcome,
                error_kind=event.kind,
            )
    refused = [event for event in events if isinstance(event, Rejected)]
    if refused:
        message = f"{refused[-1].what}: {refused[-1].refusal}"
        return FaultRecord(kind="error", message=message, is_asynchronous=False)
    return None


def _text(word: str) -> str:
    """Without what is no text: bytes of a command line that are not UTF-8."""
    return word.encode(errors="surrogateescape").decode(errors="replace")


def _show(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


def _seconds(shown: str) -> float:
    with contextlib.suppress(ValueError):
        return datetime.datetime.fromisoformat(shown).timestamp()
    return time.time()
