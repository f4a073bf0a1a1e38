"""`hypo doctor`: gets a bundle, from a folder, from a run that died or from a command that it runs.

Then prints what `doctor/doctor.py` makes of it. `hypo demo` shows that on a planted defect.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypocenter.base import package
from hypocenter.base.errors import (
    EXIT_ERROR,
    EXIT_FAULT,
    EXIT_OK,
    EXIT_USAGE,
    BadBundle,
    ErrorKind,
    HypoError,
    UsageError,
)
from hypocenter.cli.bundles import bundle_at, tell_of_good
from hypocenter.cli.child_run import (
    ending_on_signals,
    environment_of,
    exit_code,
    how,
    pass_on,
    say_armed,
)
from hypocenter.cli.escalation import Escalation, examine
from hypocenter.cli.new_file import check_new_file, write_new_file
from hypocenter.cli.output import say, show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.tool_options import DoctorOptions
from hypocenter.doctor.diagnosis import Diagnosis
from hypocenter.doctor.doctor import diagnose
from hypocenter.doctor.examining.time_limit import EXAMINE_SECONDS, make_within
from hypocenter.doctor.markdown import report_markdown
from hypocenter.doctor.page.page import report_html
from hypocenter.doctor.page.trace_events import trace_json
from hypocenter.doctor.report import report_text
from hypocenter.doctor.report_parts import Origin, headline
from hypocenter.record import bundle as bundles
from hypocenter.record.bundle import Bundle
from hypocenter.record.engine_events import Event
from hypocenter.record.events import Launched, Rejected, Stepped
from hypocenter.record.nonfinite import NonFiniteReached, NumberRead, NumbersWatched
from hypocenter.record.order_events import Disordered, OrderWatched
from hypocenter.record.ring import Run
from hypocenter.record.runtime_text import is_of_anomaly_mode, is_without_driver
from hypocenter.settings.environment import Environment
from hypocenter.watch import collect, dead_runs, foreign_runs
from hypocenter.watch.child import START_SECONDS, Deadlines, Ended, watch

#: What the folder of a bundle is called; where that is taken, -2, -3, ... follow.
DEFAULT_FOLDER = "hypo-bundle"
_MAX_BUNDLES = 1000
MAX_DEADLINE_SECONDS = 1e6
#: Of one launch that Triton's interpreter runs, where no deadline is asked for.
INTERPRETED_SECONDS = 600.0
#: What breaks on a simulated GPU, and what breaks where there is no Triton to simulate one.
_DEMO_GPU = "sim:mi300x"

NEXT = """
NEXT       your own program, unchanged:
             hypo doctor -- python train.py
           a model:
             hypo doctor -- run model.gguf -p 'Once upon a time'
           the Triton launches of a file, on the CPU:
             hypo check kernels.py
"""


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """What was asked for: one of `folder`, `options.last` and `command`, and how to go about it."""

    folder: str | None = None
    command: tuple[str, ...] = ()
    #: The verbs of `hypo`, which a command may begin with.
    verbs: frozenset[str] = frozenset()
    options: DoctorOptions = field(default_factory=DoctorOptions)
    as_json: bool = False
    #: What of this package gets the words of a command that is its own.
    module: str = package.NAME

    def __post_init__(self) -> None:
        asked = self.options
        ways = (self.folder is not None) + asked.last + bool(self.command)
        if ways != 1:
            raise UsageError(
                "give a BUNDLE, or --last, or a command behind --; "
                + ("more than one was given" if ways else "none was given")
            )
        if not self.command:
            given = {
                "--suspect": asked.suspect,
                "--nan": asked.nan,
                "--again": asked.again,
                "--deadline": asked.deadline is not None,
            }
            for name in (name for name, is_given in given.items() if is_given):
                raise UsageError(f"{name} is for a command; write it behind --")
        if asked.out is not None and self.folder is not None:
            raise UsageError("--out is for a new bundle, but BUNDLE names one that is there")
        if asked.out is not None and os.path.lexists(asked.out):
            raise UsageError(f"--out {asked.out} is there already; name another folder")
        if asked.again and self.is_own:
            raise UsageError(
                "--again is for programs that are not hypocenter's; its own engine has "
                "--launch-mode guarded, and `hypo doctor --suspect`"
            )
        if asked.nan and self.is_own:
            raise UsageError(
                "--nan is for programs that are not hypocenter's; of its own engine "
                "`hypo doctor --suspect` finds the first NaN or infinity"
            )
        if asked.nan and asked.again:
            raise UsageError("--again looks for NaN by itself; leave --nan out")
        if asked.again and asked.good is not None:
            raise UsageError("--again looks for a cause without a good run; leave --good out")
        if asked.deadline is not None and not 0 < asked.deadline <= MAX_DEADLINE_SECONDS:
            raise UsageError(
                f"--deadline is {asked.deadline}, but must be above 0 and at most "
                f"{MAX_DEADLINE_SECONDS:g}"
            )
        if not 0 < asked.examine_for <= MAX_DEADLINE_SECONDS:
            raise UsageError(
                f"--examine-for is {asked.examine_for}, but must be above 0 and at most "
                f"{MAX_DEADLINE_SECONDS:g}"
            )
        for name, file in (("--html", asked.html), ("--perfetto", asked.perfetto)):
            if file is not None:
                check_new_file(name, file)
        if self.as_json and asked.markdown:
            raise UsageError("both --json and --markdown; ask for one")

    @property
    def may_run_sources(self) -> bool:
        """The command has run its own kernels' text a moment ago; so may their replay."""
        return self.options.run_sources or (bool(self.command) and not self.is_own)

    @property
    def is_own(self) -> bool:
        """Whether the command is a verb of `hypo`; `env NAME=value PROGRAM` is the system's."""
        if not self.command or self.module != package.NAME:
            return bool(self.command)
        first, *others = self.command
        if first == "env" and not set(others) <= {"--json", "--debug", "--help", "-h"}:
            return False
        return first in self.verbs


def request(
    words: Sequence[str], options: DoctorOptions, verbs: Iterable[str], *, as_json: bool
) -> DoctorRequest:
    """What the command line asks for; raises UsageError when that makes no sense."""
    folder, command = split_words(words)
    return DoctorRequest(
        folder=folder, command=command, verbs=frozenset(verbs), options=options, as_json=as_json
    )


def split_words(words: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """BUNDLE and the command behind `--`; raises UsageError when there is a word too many."""
    at = list(words).index("--") if "--" in words else len(words)
    before, command = words[:at], tuple(words[at + 1 :])
    if len(before) > 1:
        raise UsageError(
            f"{before[1]!r} is one word too many; it takes one BUNDLE, and a command behind --"
        )
    if at < len(words) and not command:
        raise UsageError("no command stands behind --")
    return (before[0] if before else None), command


def doctor(request: DoctorRequest) -> None:
    """Examine and report; leaves with EXIT_FAULT when a fault was found, and with
    EXIT_USAGE when the good run is none to compare with.

    Raises UsageError for what cannot be asked, BadBundle for a folder that is no bundle.
    """
    asked = request.options
    if asked.again:
        _doctor_again(request)
        return
    good = _load_bundle(asked.good, asked) if asked.good is not None else None
    folder: Path | None
    if request.folder is not None:
        folder = Path(request.folder)
        examined = _load_bundle(folder, asked)
    elif asked.last:
        folder = _bundle_of_last(asked)
        examined = _load_bundle(folder, asked)
    else:
        folder, examined = _bundle_of_command(request)
    if good is not None and asked.good is not None:
        tell_of_good(good, asked.good, examined)
    # With it Triton has its interpreter where a replay has its own; the command has had it.
    os.environ.pop("TRITON_INTERPRET", None)
    with ProgressDisplay() as progress:
        progress("examining the bundle", 0.0)
        diagnosis = diagnose(
            examined,
            good,
            allow_source=request.may_run_sources,
            seconds=asked.examine_for,
        )
    _show_and_leave(request, folder, examined, diagnosis)


def _options_of_result(request: DoctorRequest, *, foreign: bool) -> tuple[str, ...]:
    """The options with which a bundle gives again what is shown here."""
    asked, options = request.options, []
    if foreign and request.may_run_sources:
        options.append("--run-sources")
    if asked.good is not None:
        options += ["--good", asked.good]
    if asked.examine_for != EXAMINE_SECONDS:
        options += ["--examine-for", f"{asked.examine_for:g}"]
    return tuple(options)


def _show_and_leave(
    request: DoctorRequest, folder: Path | None, examined: Bundle, diagnosis: Diagnosis
) -> None:
    """`folder` is where the bundle is, None where it could not be saved."""
    asked = request.options
    foreign = examined.is_foreign
    origin = Origin(
        str(folder or ""),
        options=_options_of_result(request, foreign=foreign),
        has_steps=not foreign,
        needs_sources=foreign,
        has_prompts=not examined.redacted,
    )
    if request.as_json:
        show_json(diagnosis)
    else:
        _show_report(asked, origin, diagnosis)
    _write_files(request, origin, examined, diagnosis)
    if examined.fault.kind != "none" or not diagnosis.is_clean:
        sys.exit(EXIT_FAULT)
    if diagnosis.not_compared:
        sys.exit(EXIT_USAGE)  # nothing was found out
    if request.command and examined.fault.exit_code:
        sys.exit(examined.fault.exit_code)  # it failed for a reason of its own
    if seen := foreign_runs.summary(examined.events, examined.sources):
        say(f"{headline(diagnosis)}; {seen}")


def _show_report(asked: DoctorOptions, origin: Origin, diagnosis: Diagnosis) -> None:
    """The report as text; its first line alone where the rest takes too long."""

    def text() -> str:
        if asked.markdown:
            return report_markdown(diagnosis)
        return report_text(diagnosis, origin, show_all=asked.all)

    report = make_within(asked.examine_for, text)
    show(report if report is not None else f"CAUSE      {headline(diagnosis)}\n")
    if report is None:
        say(_too_long("the rest of the report", asked))


def _write_files(
    request: DoctorRequest, origin: Origin, examined: Bundle, diagnosis: Diagnosis
) -> None:
    """The page and the timeline, each if it is asked for and is made in time."""
    asked = request.options

    def page() -> bytes:
        text = report_html(examined, diagnosis, origin, allow_source=request.may_run_sources)
        return text.encode(errors="backslashreplace")

    wanted: tuple[tuple[str, str | None, Callable[[], bytes], str], ...] = (
        ("the page", asked.html, page, ""),
        (
            "the timeline",
            asked.perfetto,
            lambda: trace_json(examined, diagnosis),
            "; ui.perfetto.dev opens it",
        ),
    )
    for what, file, make, more in wanted:
        if file is None:
            continue
        if (made := make_within(asked.examine_for, make)) is None:
            say(_too_long(what, asked))
            continue
        write_new_file(file, made)
        say(f"{what} is in {file}{more}")


def _load_bundle(folder: str | Path, asked: DoctorOptions) -> Bundle:
    """Load it as `bundle_at` does; raises UsageError where that takes too long."""
    found = make_within(asked.examine_for, lambda: bundle_at(str(folder)))
    if found is None:
        raise UsageError(_too_long(f"{folder}: the bundle", asked))
    return found


def _too_long(what: str, asked: DoctorOptions) -> str:
    seconds = f"{asked.examine_for:g} seconds"
    return f"{what} was not ready within {seconds}; --examine-for SECONDS gives it more"


def _doctor_again(request: DoctorRequest) -> None:
    """Run the command in one way after another until a cause is proven, and report on that run."""
    asked = request.options
    with ending_on_signals():
        escalation = Escalation(
            command_of(request),
            Environment.read().run_dir,
            deadlines_of(request),
            # The report is all that stdout has, where a program reads it.
            sys.stderr.fileno() if request.as_json or asked.markdown else None,
            suspect=asked.suspect,
            with_prompts=asked.with_prompts,
            seconds=asked.examine_for,
        )
        told = escalation.run()
        if told is None:
            say("no run recorded a launch or showed a fault, so nothing was examined")
            sys.exit(escalation.exit_code)
    folder = _save_or_keep(told.bundle, asked.out, None)
    if folder is not None:
        say(f"the bundle is in {folder}")
    _show_and_leave(request, folder, told.bundle, told.diagnosis)


# -- from a planted defect -----------------------------------------------------------------------


def demo() -> None:
    """Break a run, print the doctor's report of it and the next commands.

    Leaves with the doctor's exit code where that found nothing; raises as `hypo doctor` does.
    """
    from hypocenter.cli import demo_run

    device = demo_device()
    title = demo_run.ON_CPU if device == "cpu" else demo_run.ON_GPU
    say(f"a planted defect: {title}; running the engine with it on {device}")
    try:
        doctor(DoctorRequest(command=(device,), module=demo_run.__name__))
    except SystemExit as left:
        if left.code != EXIT_FAULT:
            raise
    show(NEXT)
    if device == "cpu":
        say("with Triton installed (pip install triton) the demo crashes a simulated GPU")


def demo_device() -> str:
    """A simulated GPU where Triton is installed, else the CPU."""
    return "cpu" if importlib.util.find_spec("triton") is None else _DEMO_GPU


# -- from a run that died -------------------------------------------------------------------------


def _bundle_of_last(asked: DoctorOptions) -> Path:
    """The folder of its bundle, which is made when there is none yet."""
    base = Environment.read().run_dir
    found = dead_runs.dead_runs(base)
    if not found:
        raise UsageError(f"no run that died is to be found in {base}")
    last = collect.most_telling(found)
    dead_runs.tell(last.folder)
    note = last.folder / dead_runs.BUNDLED
    with contextlib.suppress(OSError, HypoError, UnicodeDecodeError):
        if asked.out is None:
            made = Path(note.read_text())
            bundles.load(made)
            say(f"the run of pid {last.pid} ({last.when}); its bundle is {made}")
            return made
    examined = collect.collect_dead(last, with_prompts=asked.with_prompts)
    folder = _save(examined, asked.out)
    with contextlib.suppress(OSError):
        note.write_text(str(folder.resolve()))
    say(f"the run of pid {last.pid} ({last.when}); its bundle is now in {folder}")
    return folder


# -- from a command -------------------------------------------------------------------------------


def _bundle_of_command(request: DoctorRequest) -> tuple[Path | None, Bundle]:
    """Run it, and save a bundle; leaves with its exit code when there is nothing to examine.

    What cannot be saved is examined all the same; it has no folder then.
    """
    asked = request.options
    with ending_on_signals(), dead_runs.watched_runs(Environment.read().run_dir) as runs:
        ended, made = _run_command(request, runs)
        if made is not None and not (asked.nan or request.is_own or ended.is_interrupted):
            ended, made = _with_numbers(request, ended, made)
        was_killed = ended.is_interrupted and ended.signal == signal.SIGKILL
        if made is None or (was_killed and not asked.suspect):
            sys.exit(_leave(request, ended, collect.main_run(runs)))
        if made.fault.kind == "none" and not _has_launches(made):
            lost = "".join(f"; {gap}" for gap in foreign_runs.lost_launches(made.events))
            say(f"{how(ended)} and recorded no step and no launch, so nothing was examined{lost}")
            # No examination is no good result, whatever the command says of itself.
            sys.exit(exit_code(ended) or EXIT_ERROR)
        folder = _save_or_keep(made, asked.out, runs)
    if folder is None:
        say(f"{how(ended)}; it is examined all the same")
        return None, made
    say(f"{how(ended)}; the bundle is in {folder}")
    return folder, _load_bundle(folder, asked)


def _with_numbers(request: DoctorRequest, ended: Ended, made: Bundle) -> tuple[Ended, Bundle]:
    """The run; or one more with an eye on its numbers, where NaN or infinity came out of it."""
    why = _why_numbers(request, made)
    if not why:
        return ended, made
    say(f"{how(ended)} {why}; it is run once more with --nan, which finds the operation")
    looking = replace(request, options=replace(request.options, nan=True, suspect=False))
    with dead_runs.watched_runs(Environment.read().run_dir) as again:
        ended_again, seen = _run_command(looking, again)
    if seen is not None and (seen.fault.kind != "none" or _has_event(seen, NonFiniteReached)):
        return ended_again, seen
    say(f"{how(ended_again)} this time, so the first run is examined")
    return ended, made


def _why_numbers(request: DoctorRequest, made: Bundle) -> str:
    """What says that NaN or infinity came out of a run; empty where nothing does.

    A program's own check of that, or a NaN that it read, is followed where the command is to be
    looked at closely, and where that has not said why.
    """
    if is_of_anomaly_mode(made.fault.error):
        return "by torch's anomaly mode"
    asked = request.options
    is_ended = made.fault.error_kind is ErrorKind.NOT_A_NUMBER
    if not asked.suspect or not (is_ended or _has_event(made, NumberRead)):
        return ""
    if examine(made, asked.examine_for).diagnosis.is_proven:
        return ""
    return "at a number that is none" if is_ended else "and had read NaN"


def _run_command(request: DoctorRequest, runs: Path) -> tuple[Ended, Bundle | None]:
    """Run it below `runs`: how it ended, and what there is to examine."""
    asked = request.options
    # The report is all that stdout has, where a program reads it.
    stdout = sys.stderr.fileno() if request.as_json or asked.markdown else None
    environment = environment_of(
        runs, suspect=asked.suspect, is_own=request.is_own, is_nan=asked.nan
    )
    say_armed(environment)
    ended = watch(command_of(request), environment, runs, pass_on, deadlines_of(request), stdout)
    if ended.exit_code and is_without_driver(ended.stderr):
        say(
            "Triton looked for a GPU, as its autotuner does even in its interpreter; "
            "`hypo check FILE` runs the launches of such a program without one"
        )
    made = collect.collect(
        runs,
        ended,
        suspect=asked.suspect or asked.nan,
        with_prompts=asked.with_prompts,
        environment=environment,
    )
    return ended, made


def _save_or_keep(made: Bundle, out: str | None, runs: Path | None) -> Path | None:
    """Save the bundle; where that cannot be, say why, keep what it was made of, and give None."""
    try:
        return _save(made, out)
    except (OSError, BadBundle) as error:
        why = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            why = f"{error.filename}: {error.strerror}"
        kept = dead_runs.keep_runs(runs) if runs is not None else None
        where = f"; what was recorded is kept in {kept}" if kept is not None else ""
        if kept is not None and runs is not None and dead_runs.dead_runs(runs.parent):
            where += ", and `hypo doctor --last --out FOLDER` makes a bundle of it"
        say(f"{why}: the bundle was not saved{where}")
        return None


def deadlines_of(request: DoctorRequest) -> Deadlines:
    """What was asked for; else a step of ours has some minutes, and so has a foreign launch in
    Triton's interpreter; another one may take any time.
    """
    seconds = request.options.deadline
    if seconds is not None:
        return Deadlines(seconds, seconds, start=max(seconds, START_SECONDS), idle=seconds)
    if request.is_own:
        return Deadlines()
    # A launch in Triton's interpreter may damage the process that it runs in, and never end.
    longest = INTERPRETED_SECONDS if os.environ.get("TRITON_INTERPRET") == "1" else math.inf
    return Deadlines(longest, longest)


def command_of(request: DoctorRequest) -> list[str]:
    """What is executed: `hypo`'s verbs by this same Python, everything else as it stands."""
    if not request.is_own:
        return list(request.command)
    if request.command[0] == "doctor":
        raise UsageError("the doctor is not run by a doctor; give the command itself")
    return [*package.module_command(request.module), *request.command]


def _leave(request: DoctorRequest, ended: Ended, run: Run | None) -> int:
    """Nothing to examine: the exit code is that of the command."""
    seen = foreign_runs.summary(run.events, run.sources) if run is not None else ""
    if ended.exit_code == EXIT_OK and seen:
        stale = foreign_runs.stale_graphs(run.events) if run is not None else []
        over = f"graph {stale[0]} was replayed over memory that had been freed" if stale else ""
        told = f"{over}: --suspect names it" if over else "--suspect replays them"
        say(f"{'nothing crashed' if over else 'nothing found'}; {seen}; {told}")
    elif ended.exit_code == EXIT_OK:
        say("the command ended without a fault, so there is no bundle; --suspect makes one")
    else:
        say(f"{how(ended)}, which is no fault to examine; --suspect makes a bundle all the same")
    return exit_code(ended)


def _has_launches(made: Bundle) -> bool:
    told = Stepped | Launched | Rejected | Disordered | OrderWatched | NumbersWatched
    return any(isinstance(event, told) for event in made.events)


def _has_event(made: Bundle, kind: type[Event]) -> bool:
    return any(isinstance(event, kind) for event in made.events)


def _save(made: Bundle, out: str | None) -> Path:
    if out is not None:
        folder = Path(out)
    else:
        names = (
            f"{DEFAULT_FOLDER}-{n}" if n > 1 else DEFAULT_FOLDER for n in range(1, _MAX_BUNDLES)
        )
        folder = next(Path(name) for name in names if not os.path.lexists(name))
    bundles.save(made, folder)
    return folder
