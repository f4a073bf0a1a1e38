"""A report that `--json` wrote, explained: what it claims, how far that is proven, what to do next.

Reads the report's fields and examines nothing again. Never reads a sentence of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.base.errors import UsageError
from hypocenter.base.wording import count_text
from hypocenter.check.report import CheckReport, report_text
from hypocenter.doctor.diagnosis import Diagnosis, RootCause, Verdict
from hypocenter.doctor.report_parts import (
    Origin,
    headline,
    spots_of,
    subject_of,
    unseen_by_reason,
    what_to_attach,
    what_would_help,
)

MAX_BYTES = 32 << 20
#: Causes without a verdict that are told one by one.
_MAX_TOLD = 20


def explain(file: Path) -> str:
    """What the report in `file` says, for who has not read one before.

    Raises UsageError for a file that is no report of `hypo doctor --json` or `hypo check --json`.
    """
    fields = _read(file)
    try:
        if "hypotheses" in fields:
            return "\n".join(_of_doctor(msgspec.convert(fields, Diagnosis, strict=False)))
        if "findings" in fields:
            return "\n".join(_of_check(msgspec.convert(fields, CheckReport, strict=False)))
    except msgspec.ValidationError as error:
        raise UsageError(f"{file} is no report of this version: {error}") from error
    raise UsageError(f"{file} is no report; `hypo doctor --json` and `hypo check --json` make one")


def _read(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"{file} is longer than {MAX_BYTES >> 20} MiB, so it is no report")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no JSON; a report is made by --json") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{file} is no report: it holds no object")
    return fields


def _of_doctor(diagnosis: Diagnosis) -> Iterator[str]:
    yield headline(diagnosis)
    yield ""
    yield f"How far it is proven: {_standing(diagnosis)}"
    for root in diagnosis.roots:
        yield ""
        yield from _of_root(root)
    yield ""
    yield from _open_causes(diagnosis)
    refuted = sum(h.verdict is Verdict.REFUTED for h in diagnosis.hypotheses)
    yield f"Refuted, so not worth another look: {count_text(refuted, 'hypothesis', 'hypotheses')}."
    unseen = list(unseen_by_reason(diagnosis.unseen))
    if unseen:
        yield "Not seen, so nothing is claimed of it:"
        yield from (f"- {text}" for text in unseen)
    if helps := list(what_would_help(diagnosis)):
        yield "What would help:"
        yield from (f"- {text}" for text in helps)
    if diagnosis.consequences:
        yield "What follows from the cause, and is none of its own:"
        yield from (f"- {text}" for text in diagnosis.consequences)
    yield f"Attach {what_to_attach(Origin('BUNDLE'))}"


def _standing(diagnosis: Diagnosis) -> str:
    if diagnosis.is_proven:
        return (
            "a root cause is proven. The same test fails on what was recorded and passes with one "
            "change, which is told below."
        )
    if diagnosis.is_unexplained:
        return (
            "a defect is proven, but it does not explain how the run ended. Look for another one."
        )
    if not diagnosis.is_clean:
        return (
            "something wrong was seen, and nothing is proven to have caused it. Change nothing yet."
        )
    if diagnosis.has_symptom:
        return "no cause was found in what was recorded. Change nothing on the strength of this."
    return "nothing wrong was found in what was recorded. That does not prove that all is right."


def _of_root(root: RootCause) -> Iterator[str]:
    yield f"Cause: {root.cause}{subject_of(root)}"
    yield f"- What is wrong: {root.sentence}"
    for spot in spots_of(root):
        yield f"- {spot.label} {spot.place}: {spot.text}"
    if root.alternatives:
        yield "- Fixes: several pass, and nothing tells which one is meant. Ask who wrote it:"
        yield from (f"  - {text}" for text in (root.fix, *(a.fix for a in root.alternatives)))
    else:
        tried = "it was applied and tried" if root.effect is not None else "it was not applied"
        yield f"- Fix ({tried}): {root.fix}"
    yield f"- Fails: {root.proof.red}"
    yield f"- Passes with {root.proof.corrected}: {root.proof.green}"


def _open_causes(diagnosis: Diagnosis) -> Iterator[str]:
    for verdict, says in (
        (Verdict.CONFIRMED, "Confirmed: the run was seen to do it"),
        (Verdict.INCONCLUSIVE, "Tested, and not decided"),
        (Verdict.NOT_TESTED, "Not tested, so neither found nor excluded"),
    ):
        rows = [h for h in diagnosis.hypotheses if h.verdict is verdict]
        if not rows:
            continue
        yield f"{says}:"
        for row in rows[:_MAX_TOLD]:
            yield f"- {row.cause}: {'; '.join(row.evidence)}"
            if row.would_refute and verdict is not Verdict.NOT_TESTED:
                yield f"  It would be refuted by this: {row.would_refute}"
        if len(rows) > _MAX_TOLD:
            yield f"- and {len(rows) - _MAX_TOLD} more"


def _of_check(report: CheckReport) -> Iterator[str]:
    yield report_text(report)
    yield ""
    yield "How far it is proven: each finding is an access that a launch made when it was run here."
    if report.error:
        yield f"The file did not run to its end, so later launches were not seen: {report.error}"
    if not report.findings:
        yield "Nothing wrong was met by these launches. Other shapes may still be wrong."
