"""`python -m faults [NAMES]`: what the doctor says of planted faults and healthy programs.

NAMES are cases or collections; all when left out. `python -m faults run NAME` runs one victim as it
would fault in the field, and `python -m faults serve` puts victims into the workers of a server.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec

from faults.ablation import idle_rungs, lines_of, named_without
from faults.catalogue import chosen, named, platform_of
from faults.harmless import find
from faults.program import Program, require_interpreter
from faults.report import environment_of
from faults.row import Case, Platform, Row
from faults.table import counts_of, line_of, slow_runs, table
from faults.victim_run import command, run_child
from hypocenter.base.errors import EXIT_GATE, EXIT_OK, HypoError, UsageError
from hypocenter.cli.output import leave_broken_pipe
from hypocenter.device.limits import present_gpu

MAX_JOBS = 64


def main(words: Sequence[str]) -> int:
    """Returns the exit status: 4 where a fault or something healthy is not told as wanted."""
    try:
        try:
            return _answer(words)
        finally:
            sys.stdout.flush()  # here, where it is known that a reader may be gone
    except BrokenPipeError:
        leave_broken_pipe()


def _answer(words: Sequence[str]) -> int:
    verbs = {"run": _run_victim, "serve": _serve}
    try:
        if words and words[0] in verbs:
            return verbs[words[0]](words[1:])
        return _judge(_options().parse_args(words))
    except HypoError as error:
        _say(f"error: {error}")
        return error.exit_code


def _options() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser("python -m faults", description=about[0], epilog=about[1])
    parser.add_argument("names", nargs="*", metavar="NAMES", help="cases or collections")
    parser.add_argument(
        "--platform", type=Platform, choices=list(Platform), metavar="|".join(Platform),
        help="what it runs on; the card where there is one, else without",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--json", action="store_true", help="rows and counts as JSON")
    parser.add_argument(
        "--rows", type=Path, help="file to which each row is added as JSON when it is there"
    )
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time"
    )
    parser.add_argument("--work", type=Path, help="folder for bundles; a new one when left out")
    parser.add_argument(
        "--again", action="store_true", help="judge the bundles in --work, and run nothing"
    )
    parser.add_argument(
        "--ablation", action="store_true", help="then leave out one rung of the doctor at a time"
    )
    return parser


def _judge(options: argparse.Namespace) -> int:
    if not 1 <= options.jobs <= MAX_JOBS:
        raise UsageError(f"--jobs is {options.jobs}, but must be from 1 to {MAX_JOBS}")
    if options.again and options.work is None:
        raise UsageError("--again judges the bundles of an earlier run; name its folder by --work")
    if options.rows is not None and (options.again or not options.rows.absolute().parent.is_dir()):
        why = "--again makes no rows" if options.again else "there is no such folder"
        raise UsageError(f"--rows {options.rows}: {why}; leave it out, or make the folder first")
    has_card = present_gpu() is not None
    if options.list:
        for case in named(options.names):
            print(f"{case.name:<34} {case.collection:<9} {', '.join(sorted(case.platforms))}")
        return EXIT_OK
    cases = chosen(options.names, options.platform, has_card)
    on_cpu = (case for case in cases if isinstance(case, Program))
    if any(platform_of(case, options.platform, has_card) is Platform.CPU for case in on_cpu):
        require_interpreter()
    work = options.work or Path(tempfile.mkdtemp(prefix="faults-"))
    work.mkdir(parents=True, exist_ok=True)
    work = work.resolve()
    if options.again:
        return _again(cases, work)
    if ran := [case.name for case in cases if (work / case.collection / case.name).exists()]:
        raise UsageError(f"--work {work} has an earlier run of {ran[0]}; name an empty folder")
    rows = _rows(cases, options, has_card, work)
    found = named_without(rows, cases, work, options.jobs) if options.ablation else {}
    idle = idle_rungs(found) if found else []
    if options.json:
        told = {"counts": counts_of(rows), "rows": rows, "without": found, "work": str(work)}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
    else:
        for line in (*table(rows), *(lines_of(found) if found else ())):
            print(line)
        _say(f"bundles are in {work}")
    slow = slow_runs(rows)
    for line in slow:
        _say(line)
    for rung in idle:
        _say(f"nothing is lost without {rung!r}: delete it, or add the fault that needs it")
    return EXIT_GATE if idle or slow or not all(row.is_as_wanted for row in rows) else EXIT_OK


def _rows(
    cases: Sequence[Case], options: argparse.Namespace, has_card: bool, work: Path
) -> list[Row]:
    """Rows in the order of their cases; each is told when it is there."""

    def run(case: Case) -> list[Row]:
        platform = platform_of(case, options.platform, has_card)
        assert platform is not None
        folder = work / case.collection
        folder.mkdir(exist_ok=True)
        return case.run(platform, folder)

    with ThreadPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(run, case) for case in cases]
        try:
            for done in as_completed(runs):
                for row in done.result():
                    _tell(row, options)
        except BrokenPipeError:  # nobody reads; what has not begun stays undone
            pool.shutdown(cancel_futures=True)
            raise
    return [row for done in runs for row in done.result()]


def _tell(row: Row, options: argparse.Namespace) -> None:
    if options.rows is not None:
        with options.rows.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
    print(line_of(row), file=sys.stderr if options.json else sys.stdout, flush=True)


def _again(cases: Sequence[Case], work: Path) -> int:
    """From the bundles of an earlier run: which are named rightly by the doctor as it is now."""
    found = {case.key: case.named_again(work / case.collection, ()) for case in cases}
    judged = {name: again.is_right for name, again in found.items() if again is not None}
    for name, is_named in judged.items():
        print(f"{name:<34} {'right' if is_named else 'NOT RIGHT'}")
    print(f"{sum(judged.values())} of {len(judged)} are named rightly")
    return EXIT_OK if all(judged.values()) else EXIT_GATE


def _run_victim(words: Sequence[str]) -> int:
    """Leaves with the exit code of its end; with --out its bundle is saved."""
    parser = argparse.ArgumentParser("python -m faults run")
    parser.add_argument("name")
    parser.add_argument("--twin", action="store_true", help="the same way, without the defect")
    parser.add_argument("--device", default="", help="instead of the victim's own")
    parser.add_argument("--out", type=Path, help="new folder for its bundle")
    given = parser.parse_args(words)
    victim = find([given.name])[0]
    if given.out is None:
        line = command(victim, twin=given.twin, device=given.device)
        return _exit_code(subprocess.run(line, env=environment_of()).returncode)
    if given.out.exists():
        raise UsageError(f"--out {given.out} is there already; name another folder")
    outcome = run_child(victim, given.out, twin=given.twin, device=given.device)
    _say(f"{victim.name}: {outcome.symptom()}; {outcome.last_words() or 'nothing was said'}")
    if outcome.bundle is not None:
        _say(f"the bundle is in {given.out / 'bundle'}; see hypo doctor {given.out / 'bundle'}")
    ended = outcome.ended
    return _exit_code(-ended.signal if ended.signal else ended.exit_code or EXIT_OK)


def _serve(words: Sequence[str]) -> int:
    from faults.serving.serve import main as serve

    return serve(words)


def _exit_code(returned: int) -> int:
    """As a shell tells the signal that ended a process."""
    return 128 - returned if returned < 0 else returned


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
