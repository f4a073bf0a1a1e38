"""`hypo verify`: prints what `verify/verify.py` found, and leaves with what that is worth."""

from __future__ import annotations

from pathlib import Path

from hypocenter.base.errors import UsageError
from hypocenter.cli.outcomes import OutcomeWords, tell
from hypocenter.cli.output import say
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.settings.config import EngineConfig
from hypocenter.verify.own.file import verify_file, write_tests
from hypocenter.verify.verify import EFFORTS
from hypocenter.verify.verify import verify as verify_model

_WORDS = OutcomeWords("hypo verify", "not run", "NOT SEEN", "stages")
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
    """Print the table, and leave as `tell` does."""
    with ProgressDisplay(quiet=quiet or as_json) as progress:
        outcome = verify_model(
            path, config, EFFORTS[effort], with_memory=with_memory, progress=progress
        )
    tell(outcome, page, _WORDS, as_json=as_json)


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

    tell(outcome, page, _WORDS, as_json=as_json, write=write)
