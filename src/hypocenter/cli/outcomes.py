"""What `hypo verify` and `hypo audit` print of an outcome, and with which exit code they leave."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypocenter.base.errors import EXIT_BLIND, EXIT_ERROR, EXIT_GATE, EXIT_OK
from hypocenter.cli.new_file import write_new_file
from hypocenter.cli.output import say, show, show_json
from hypocenter.verify.outcome import Stage, StageVerdict, Verification
from hypocenter.verify.page import outcome_html

_EXITS = {
    StageVerdict.RIGHT: EXIT_OK,
    StageVerdict.WRONG: EXIT_GATE,
    StageVerdict.BLIND: EXIT_BLIND,
    StageVerdict.NOT_RUN: EXIT_ERROR,
}
_MOST_REASONS = 4


@dataclass(frozen=True, slots=True)
class OutcomeWords:
    """The verb, what a stage is called and what stands before it where nothing was looked at, and
    what the stages are."""

    verb: str
    not_run: str
    unseen: str
    things: str


def tell(
    outcome: Verification,
    page: str | None,
    words: OutcomeWords,
    *,
    as_json: bool,
    write: Callable[[], None] = lambda: None,
) -> None:
    """Print the outcome, have `write` write what else there is, and leave with its exit code.

    That is EXIT_GATE when something is wrong, EXIT_BLIND when a planted error was not seen, and
    EXIT_ERROR when nothing was looked at.

    The verdict comes first: a file that cannot be written takes neither it nor its exit code, nor
    the other file. Raises OSError for one where all is right.
    """
    if as_json:
        not_run = [stage.name for stage in outcome.stages if not _did_run(stage)]
        show_json({"verdict": outcome.verdict, "not_run": not_run, **_fields(outcome)})
    else:
        show("\n".join(outcome_lines(outcome, words)))
    code = _EXITS[outcome.verdict]
    writers: dict[str, Callable[[], object]] = {"test": write}
    if page is not None:
        data = outcome_html(outcome, words.verb).encode()
        writers = {"page": functools.partial(write_new_file, page, data), **writers}
    first = None
    for what, write_it in writers.items():
        try:
            write_it()
        except OSError as error:
            if code == EXIT_OK and first is None:
                first = error  # nothing else is wrong: this is what the exit code tells
            else:
                say(f"{error.filename}: {error.strerror}; the {what} was not written")
    if first is not None:
        raise first
    if code != EXIT_OK:
        sys.exit(code)


def _fields(outcome: Verification) -> dict[str, object]:
    return {name: getattr(outcome, name) for name in outcome.__struct_fields__}


def outcome_lines(outcome: Verification, words: OutcomeWords) -> Iterator[str]:
    """The table, a line for each stage, and below it what is wrong and what was not looked at."""
    yield f"MODEL     {outcome.model}"
    yield f"DEVICE    {outcome.device}: {outcome.hardware}"
    yield ""
    width = max(len(stage.name) for stage in outcome.stages)
    for stage in outcome.stages:
        verdict = words.not_run if stage.verdict is StageVerdict.NOT_RUN else stage.verdict
        yield f"{stage.name:<{width}}  {verdict:<{len(words.not_run)}}  {_coverage_text(stage)}"
    yield ""
    for stage in outcome.stages:
        for finding in stage.findings:
            yield f"WRONG     {stage.name}: {finding.where}".rstrip(": ")
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
        for line in _uncovered_lines(stage):
            yield f"{words.unseen}  {stage.name}: {line}"
    yield f"VERDICT   {outcome.verdict}, {_extent_text(outcome, words)}, in {outcome.seconds:.0f} s"


def _did_run(stage: Stage) -> bool:
    return stage.verdict is not StageVerdict.NOT_RUN


def _uncovered_lines(stage: Stage) -> Iterator[str]:
    """What was not looked at, a line for each reason that the table does not tell."""
    by_reason: dict[str, list[str]] = {}
    for item in stage.uncovered:
        by_reason.setdefault(item.why, []).append(item.what)
    if not _did_run(stage) and by_reason:
        del by_reason[stage.uncovered[0].why]
    for why, things in list(by_reason.items())[:_MOST_REASONS]:
        more = f" and {len(things) - 1} more" if len(things) > 1 else ""
        yield f"{things[0]}{more}: {why}"
    if (left := len(by_reason) - _MOST_REASONS) > 0:
        yield f"{left} more reasons; --json lists them"


def _extent_text(outcome: Verification, words: OutcomeWords) -> str:
    """How many stages ran, and which ones did not, or not to their end."""
    ran = [stage for stage in outcome.stages if _did_run(stage)]
    left = [stage.name for stage in outcome.stages if not _did_run(stage)]
    in_part = [stage.name for stage in ran if stage.num_covered < stage.num_all]
    named = [
        f"{heading}: {', '.join(names)}"
        for heading, names in ((words.not_run, left), ("in part", in_part))
        if names
    ]
    of = f" ({'; '.join(named)})" if named else ""
    return f"by {len(ran)} of {len(outcome.stages)} {words.things}{of}"


def _coverage_text(stage: Stage) -> str:
    if stage.verdict is StageVerdict.NOT_RUN:
        return stage.uncovered[0].why if stage.uncovered else ""
    canary = stage.canary
    planted = f", planted errors seen {canary.num_seen} of {canary.num_planted}" if canary else ""
    return (
        f"{stage.num_covered} of {stage.num_all} {stage.things}, "
        f"{stage.num_checks} checks{planted}, {stage.seconds:.1f} s"
    )
