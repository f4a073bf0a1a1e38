"""Runs a foreign command in one way after another until the doctor has proven a cause.

First as it is; where it ended at NaN with an eye on its numbers, and where threads of a compiled
graph ended it on one thread; then guarded, with blocking launches and the driver watched, and below
compute-sanitizer. Each run is told in a line on stderr.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from hypocenter.base.errors import ErrorKind
from hypocenter.base.own_folder import own_folder
from hypocenter.base.wording import bare_name
from hypocenter.cli.child_run import environment_of, exit_code, how, pass_on, say_armed
from hypocenter.cli.output import say
from hypocenter.coredump import rocm
from hypocenter.doctor.diagnosis import Diagnosis, RunMade, Verdict
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.examining.time_limit import EXAMINE_SECONDS
from hypocenter.doctor.report_parts import headline, run_text
from hypocenter.doctor.rungs.driver.launches import NAME as DRIVER
from hypocenter.doctor.rungs.driver.logged_launch import launch_text
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.driver_run import DriverRun
from hypocenter.record.events import Launched, LostLaunch, MaskedOff
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.gpu_stop import GpuStop, SanitizerReport
from hypocenter.record.nonfinite import NumbersWatched
from hypocenter.record.order_events import Disordered, OrderWatched
from hypocenter.settings.environment import launch_blocking
from hypocenter.watch import collect, dead_runs, sanitizers
from hypocenter.watch.child import Deadlines, Ended, watch
from hypocenter.watch.gpu_dumps import WATCHES_DRIVER, has_driver, watches_driver

#: What none of the runs looks for without --suspect.
UNGUARDED = (
    "elements that nobody wrote, reads of them, and races show in `hypo check FILE`, where FILE "
    "makes the launches"
)
#: Has each vendor's runtime finish a launch before it returns.
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1", "AMD_SERIALIZE_KERNEL": "3", "HIP_LAUNCH_BLOCKING": "1"}


#: Has torch.compile write C++ for one thread. An error of a check in several ends the process, and
#: on one it is an exception, of which the program's own line is known.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
#: What such a check of Inductor's says (torch/_inductor/codegen/common.py, `indirect_assert`).
_CHECK = "index out of bounds: 0 <= "
#: Has CUPTI record each launch, of kernels that are not Triton's as well.
WATCHED = {WATCHES_DRIVER: "1"}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a command: what it adds to the environment, and how it is told of."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    is_guarded: bool = False
    is_checked: bool = False
    is_nan: bool = False
    is_single: bool = False
    is_waited_for: bool = False


WAYS = (
    Way("as it is"),
    Way("with an eye on its numbers", is_nan=True),
    Way("on one thread", ONE_THREAD, is_single=True),
    Way("guarded", is_guarded=True),
    Way("with blocking launches, the driver watched", {**BLOCKING, **WATCHED}, is_waited_for=True),
    Way("below compute-sanitizer", sanitizers.VARIABLES, is_checked=True),
)


@dataclass(frozen=True, slots=True)
class ExaminedRun:
    """A run and what the doctor made of it."""

    bundle: Bundle
    diagnosis: Diagnosis


@dataclass(slots=True)
class Escalation:
    """The runs of one command; below `base` they record."""

    command: Sequence[str]
    base: Path
    deadlines: Deadlines
    stdout: int | None = None
    suspect: bool = False
    with_prompts: bool = False
    #: Of each examination.
    seconds: float = EXAMINE_SECONDS
    #: That of the first run.
    exit_code: int = 0
    _runs: list[RunMade] = field(default_factory=list)
    _examined: dict[int, ExaminedRun] = field(default_factory=dict)

    def run(self) -> ExaminedRun | None:
        """Until a cause is proven or no way is left; the run to report on, None without any."""
        left = list(WAYS)
        for number in range(len(WAYS)):
            way = self._next(left)
            if way.is_nan and not self._ended_at_number():
                continue
            if way.is_single and not self._threads_ended_it():
                continue
            if reason := self._left_out(way):
                self._tell(RunMade(name=way.name, left_out=reason))
                continue
            ended, examined = self._run(way)
            if number == 0:
                self.exit_code = exit_code(ended)
            if examined is None:
                self._tell(RunMade(name=way.name, ended=how(ended), found="nothing was recorded"))
            else:
                self._examined[len(self._runs)] = examined
                found = _found_text(examined)
                self._tell(RunMade(name=way.name, ended=how(ended), found=found))
                if examined.diagnosis.is_proven:
                    break
            if ended.is_interrupted:
                break
        else:
            say("no run proved a cause" + ("" if self.suspect else f"; {UNGUARDED}"))
        return self._best()

    def _next(self, left: list[Way]) -> Way:
        """Take the next of the ways that are left.

        A guard is put around Triton's launches alone. So where a kernel stopped that is none of
        these, the driver is watched first.
        """
        if self._other_stopped():
            left.sort(key=lambda way: way.is_guarded)  # keeps the order of the others
        return left.pop(0)

    def _other_stopped(self) -> bool:
        """Whether a kernel that is none of Triton's stopped in the first run."""
        first = self._examined.get(0)
        sights = first.diagnosis.sights if first is not None else ()
        return any(sight.exception and sight.kernel and not sight.is_triton for sight in sights)

    def _has_driver_claim(self) -> bool:
        """Whether a run whose launches the driver told of has confirmed an access by that."""
        return any(
            run.bundle.driver_run is not None
            and any(
                told.verdict is Verdict.CONFIRMED and DRIVER in told.diagnostic
                for told in run.diagnosis.hypotheses
            )
            for run in self._examined.values()
        )

    def _ended_at_number(self) -> bool:
        """Whether the command, run as it is, found NaN or infinity itself and ended there."""
        first = self._examined.get(0)
        return first is not None and first.bundle.fault.error_kind is ErrorKind.NOT_A_NUMBER

    def _threads_ended_it(self) -> bool:
        """Whether the command was aborted by a check in C++ of torch.compile's."""
        first = self._examined.get(0)
        if first is None or first.bundle.fault.signal != signal.SIGABRT:
            return False
        return any(".cpp:" in line and _CHECK in line for line in first.bundle.stderr.splitlines())

    def _tell(self, run: RunMade) -> None:
        self._runs.append(run)
        say(f"run {len(self._runs)}, {run_text(run)}")

    def _left_out(self, way: Way) -> str:
        """Why this way can tell nothing more; empty where it may."""
        first = self._examined.get(0)
        if way.is_guarded:
            seen = first.bundle.events if first is not None else ()
            has_launched = any(isinstance(event, Launched | LostLaunch) for event in seen)
            return "" if has_launched else "no launch of Triton was recorded that it could guard"
        if way.name == WAYS[0].name or way.is_nan or way.is_single:
            return ""
        if first is None or first.bundle.fault.kind == "none":
            return "the command ended without a fault, and this only says where one is made"
        if first.bundle.device == "interpreter":
            return "the launches ran on the CPU, one after the other"
        is_of_amd = first.bundle.device.startswith("hip") or _has_only_amds_driver()
        if way.is_waited_for and (blocking := launch_blocking()):
            if is_of_amd:  # CUPTI is for GPUs of NVIDIA, but ROCm's runtime logs launches
                is_new = bool(rocm.variables_of_waiting(os.environ, self.base))
                return "" if is_new else f"{blocking} was set before"
            if watches_driver():
                return f"{blocking} and {WATCHES_DRIVER} were set before"
        if way.is_checked and is_of_amd:
            return "compute-sanitizer is for GPUs of NVIDIA"
        if way.is_checked and sanitizers.memcheck() is None:
            return "compute-sanitizer is not on PATH"
        if way.is_checked and self._other_stopped() and self._has_driver_claim():
            return (
                "the driver's record has the access already, and of a kernel that is none of "
                "Triton's the tool proves no more"
            )
        return ""

    def _run(self, way: Way) -> tuple[Ended, ExaminedRun | None]:
        with dead_runs.watched_runs(self.base) as runs:
            return self._run_below(runs, way)

    def _run_below(self, runs: Path, way: Way) -> tuple[Ended, ExaminedRun | None]:
        environment = environment_of(
            runs, suspect=self.suspect, is_own=False, is_guarded=way.is_guarded, is_nan=way.is_nan
        )
        command, deadlines = list(self.command), self.deadlines
        if way.is_checked and (program := sanitizers.memcheck()) is not None:
            command = sanitizers.memcheck_command(program, command, runs)
            deadlines = replace(deadlines, enough=sanitizers.enough_reports(runs))
        environment |= way.variables
        armed = rocm.variables_of_waiting(environment, runs) if way.is_waited_for else ()
        environment |= rocm.as_environment(armed)
        say_armed(environment, armed)
        ended = watch(command, environment, runs, pass_on, deadlines, self.stdout)
        bundle = collect.collect(
            runs,
            ended,
            suspect=True,
            with_prompts=self.with_prompts,
            fault_before=self._fault_before(),
            reports=self._with_sites(sanitizers.reports_below(runs)) if way.is_checked else (),
            environment=environment,
        )
        if bundle is None or (bundle.fault.kind == "none" and not _has_evidence(bundle)):
            return ended, None
        if way.is_waited_for:
            bundle = self._with_dump_before(bundle)
        return ended, examine(bundle, self.seconds)

    def _with_dump_before(self, bundle: Bundle) -> Bundle:
        """Adds what the GPU left when the command was run as it is, if it ended the same way.

        Beside CUPTI no dump is written; that one names kernel, line and machine code.
        """
        first = self._examined.get(0)
        if first is None or bundle.gpu_stops:
            return bundle
        before, now = first.bundle.fault, bundle.fault
        is_alike = (before.kind, before.error_kind) == (now.kind, now.error_kind)
        if not is_alike and not _has_failed_alike(bundle.driver_run, first.bundle.gpu_stops):
            return bundle
        stops = tuple(
            msgspec.structs.replace(stop, is_of_run_before=True) for stop in first.bundle.gpu_stops
        )
        return msgspec.structs.replace(bundle, gpu_stops=stops)

    def _with_sites(self, reports: Sequence[SanitizerReport]) -> tuple[SanitizerReport, ...]:
        """Adds the line that launched a kernel, where the driver was watched in a run before."""
        seen = (run.bundle.driver_run for run in self._examined.values())
        watched = next(filter(None, seen), None)
        return tuple(with_site(report, watched) for report in reports)

    def _fault_before(self) -> FaultRecord | None:
        """How the command ended as it is; None for that run itself."""
        first = self._examined.get(0)
        return first.bundle.fault if first is not None else None

    def _best(self) -> ExaminedRun | None:
        """The run that proved a cause; else one that confirmed something, else one whose log
        names a launch, else the first."""
        if not self._examined:
            return None

        def rank(number: int) -> tuple[bool, bool, bool, int]:
            diagnosis = self._examined[number].diagnosis
            is_named = self._examined[number].bundle.logged_launch is not None
            return diagnosis.is_proven, not diagnosis.is_clean, is_named, -number

        best = max(self._examined, key=rank)
        runs = [
            msgspec.structs.replace(run, is_told=number == best)
            for number, run in enumerate(self._runs)
        ]
        examined = self._examined[best]
        return ExaminedRun(
            examined.bundle, msgspec.structs.replace(examined.diagnosis, runs=tuple(runs))
        )


def with_site(report: SanitizerReport, watched: DriverRun | None) -> SanitizerReport:
    """The report with the line that launched its kernel, where a watch has seen every launch, and
    no other line that did."""
    name = bare_name(report.kernel)
    if watched is None or watched.num_graphs or watched.num_launches > len(watched.launches):
        return report
    sites = {
        launch.site
        for launch in watched.launches
        if (kernel := watched.kernel_of(launch)) is not None
        and name in (bare_name(kernel.name), bare_name(kernel.symbol))
    }
    only = sites.pop() if len(sites) == 1 and name else ""
    return msgspec.structs.replace(report, launched_at=only)


def _has_failed_alike(run: DriverRun | None, stops: Sequence[GpuStop]) -> bool:
    """Whether the first launch that the driver answered with a fault is of a kernel that stopped.

    A program that looks at the driver's answers itself ends by a check of its own then.
    """
    failed = run.failed_launch if run is not None else None
    kernel = run.kernel_of(failed) if run is not None and failed is not None else None
    return kernel is not None and any(
        stop.faulting is not None and stop.faulting.symbol == kernel.symbol for stop in stops
    )


def _has_only_amds_driver() -> bool:
    return rocm.has_driver() and not has_driver()


def _has_evidence(bundle: Bundle) -> bool:
    evidence = Launched | MaskedOff | Disordered | OrderWatched | NumbersWatched
    has_failed = bundle.driver_run is not None and bundle.driver_run.failed_launch is not None
    is_told = any(isinstance(event, evidence) for event in bundle.events)
    return is_told or has_failed or bool(bundle.reports)


def examine(bundle: Bundle, seconds: float) -> ExaminedRun:
    """What the doctor makes of a bundle, of which it sees only what can be saved and loaded."""
    # With it Triton has its interpreter where a replay has its own; the command has it still.
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with own_folder("hypo-again-") as folder:
            place = folder / "bundle"
            bundles.save(bundle, place)
            loaded = bundles.load(place)
        # The command has run its own kernels' text a moment ago; so may their replay.
        return ExaminedRun(loaded, diagnose(loaded, allow_source=True, seconds=seconds))
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def _found_text(examined: ExaminedRun) -> str:
    """What a run showed: the cause, or the launch that failed where each was waited for."""
    text = headline(examined.diagnosis)
    bundle = examined.bundle
    if (logged := bundle.logged_launch) is not None and not examined.diagnosis.is_proven:
        text += f"; {launch_text(logged)}"
    launches = [event for event in bundle.events if isinstance(event, Launched)]
    is_blocking = launch_blocking(bundle.environment) is not None
    if (
        is_blocking
        and launches
        and bundle.fault.kind != "none"
        and not examined.diagnosis.is_proven
    ):
        last = launches[-1]
        text += f"; launch {last.step} failed: {last.launch.kernel} at {last.launch.site}"
    return text
