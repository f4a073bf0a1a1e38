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
_MOST_UNCOVERED = 4


@dataclass(frozen=True, slots=True)
class OutcomeWords:
    """The verb, what a stage is called and what stands before it where nothing was looked at, and
    the end of the verdict's line."""

    verb: str
    not_run: str
    unseen: str
    verdict: str


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
        show_json({"verdict": outcome.verdict, **_fields(outcome)})
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
        # The table tells of a stage of which nothing was looked at.
        uncovered = [item for item in stage.uncovered if item.what != stage.name]
        for item in uncovered[:_MOST_UNCOVERED]:
            yield f"{words.unseen}  {stage.name}: {item.what}: {item.why}"
        if (more := len(uncovered) - _MOST_UNCOVERED) > 0:
            yield f"{words.unseen}  {stage.name}: {more} more; --json lists them"
    ran = sum(stage.verdict is not StageVerdict.NOT_RUN for stage in outcome.stages)
    left = len(outcome.stages) - ran
    ending = words.verdict.format(ran=ran, left=left, all=len(outcome.stages))
    yield f"VERDICT   {outcome.verdict}, {ending} in {outcome.seconds:.0f} s"


def _coverage_text(stage: Stage) -> str:
    if stage.verdict is StageVerdict.NOT_RUN:
        return stage.uncovered[0].why if stage.uncovered else ""
    canary = stage.canary
    planted = f", planted errors seen {canary.num_seen} of {canary.num_planted}" if canary else ""
    return (
        f"{stage.num_covered} of {stage.num_all} {stage.things}, "
        f"{stage.num_checks} checks{planted}, {stage.seconds:.1f} s"
    )
