"""`hypo verify`: prints what `verify/verify.py` found, and leaves with what that is worth."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from hypocenter.base.errors import EXIT_BLIND, EXIT_ERROR, EXIT_GATE, EXIT_OK, UsageError
from hypocenter.cli.new_file import write_new_file
from hypocenter.cli.output import say, show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.settings.config import EngineConfig
from hypocenter.verify.outcome import Stage, StageVerdict, Verification
from hypocenter.verify.own.file import verify_file, write_tests
from hypocenter.verify.page import outcome_html
from hypocenter.verify.verify import EFFORTS
from hypocenter.verify.verify import verify as verify_model

_EXITS = {
    StageVerdict.RIGHT: EXIT_OK,
    StageVerdict.WRONG: EXIT_GATE,
    StageVerdict.BLIND: EXIT_BLIND,
    StageVerdict.NOT_RUN: EXIT_ERROR,
}
_MOST_UNCOVERED = 4
MAX_BUDGET_SECONDS = 1e6


def verify(
    path: str,
    config: EngineConfig,
    effort: str,
    *,
    with_memory: bool,
    page: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the table; leaves with EXIT_GATE when something is wrong, EXIT_BLIND when an error
    that was planted was not seen, and EXIT_ERROR when nothing was looked at."""
    with ProgressDisplay(quiet=quiet or as_json) as progress:
        outcome = verify_model(
            path, config, EFFORTS[effort], with_memory=with_memory, progress=progress
        )
    _tell(outcome, page, as_json=as_json)


def verify_own(
    path: Path,
    arch: str,
    budget_seconds: float,
    tests: Path | None,
    *,
    page: str | None,
    as_json: bool,
) -> None:
    """Print what became of a file's kernels; leaves as `verify` does.

    Raises UsageError for no file or a budget that is none, HypoError where nothing could be held.
    """
    if not 0 < budget_seconds <= MAX_BUDGET_SECONDS:
        limit = f"must be above 0 and at most {MAX_BUDGET_SECONDS:g}"
        raise UsageError(f"--budget is {budget_seconds}, but {limit}")
    if tests is not None and not tests.is_dir():
        raise UsageError(f"--tests is {tests}, but there is no such folder")
    outcome, report = verify_file(path, arch, budget_seconds)

    def write() -> None:
        for place in write_tests(path, report, tests) if tests is not None else ():
            say(f"wrote {place}; run it with pytest")

    _tell(outcome, page, as_json=as_json, write=write)


def _tell(
    outcome: Verification,
    page: str | None,
    *,
    as_json: bool,
    write: Callable[[], None] = lambda: None,
) -> None:
    """The verdict comes first: a file that cannot be written takes neither it nor its exit code."""
    if as_json:
        show_json({"verdict": outcome.verdict, **_fields(outcome)})
    else:
        show("\n".join(outcome_lines(outcome)))
    code = _EXITS[outcome.verdict]
    if page is not None:
        make = functools.partial(write_new_file, page, outcome_html(outcome).encode())
        _try(make, page, "page", code)
    _try(write, None, "test", code)
    if code != EXIT_OK:
        sys.exit(code)


def _try(write: Callable[[], None], where: str | None, what: str, code: int) -> None:
    """Write; what cannot be written is told, and raised only where nothing else is wrong."""
    try:
        write()
    except OSError as error:
        if code == EXIT_OK:
            raise
        say(f"{where or error.filename}: {error.strerror}; the {what} was not written")


def _fields(outcome: Verification) -> dict[str, object]:
    return {name: getattr(outcome, name) for name in outcome.__struct_fields__}


def outcome_lines(outcome: Verification) -> Iterator[str]:
    """The table, a line for each stage, and below it what is wrong and what was not looked at."""
    yield f"MODEL     {outcome.model}"
    yield f"DEVICE    {outcome.device}: {outcome.hardware}"
    yield ""
    width = max(len(stage.name) for stage in outcome.stages)
    for stage in outcome.stages:
        yield f"{stage.name:<{width}}  {stage.verdict:<7}  {_coverage_text(stage)}"
    yield ""
    for stage in outcome.stages:
        for finding in stage.findings:
            yield f"WRONG     {stage.name}: {finding.where}"
            yield f"          {finding.what}"
            if "case" in finding.details:
                yield f"          inputs: {finding.details['case']}"
        canary = stage.canary
        if stage.verdict is StageVerdict.BLIND and canary is not None:
            yield (
                f"BLIND     {stage.name}: of {canary.num_planted} planted errors "
                f"({canary.planted}) it saw {canary.num_seen}"
            )
    for stage in outcome.stages:
        for item in stage.uncovered[:_MOST_UNCOVERED]:
            yield f"NOT SEEN  {stage.name}: {item.what}: {item.why}"
        if (more := len(stage.uncovered) - _MOST_UNCOVERED) > 0:
            yield f"NOT SEEN  {stage.name}: {more} more; --json lists them"
    yield f"VERDICT   {outcome.verdict}, of what was looked at in {outcome.seconds:.0f} s"


def _coverage_text(stage: Stage) -> str:
    if stage.verdict is StageVerdict.NOT_RUN:
        return stage.uncovered[0].why if stage.uncovered else ""
    canary = stage.canary
    planted = f", planted errors seen {canary.num_seen} of {canary.num_planted}" if canary else ""
    return (
        f"{stage.num_covered} of {stage.num_all} {stage.things}, "
        f"{stage.num_checks} checks{planted}, {stage.seconds:.1f} s"
    )
