"""A Diagnosis as text for a terminal; `markdown.py` has it as Markdown. Decides nothing.

The first lines are what to do at three in the morning: cause, the line to change, fix.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hypocenter.doctor.diagnosis import Diagnosis, GpuSight, RootCause, Verdict
from hypocenter.doctor.gpu_sight import sight_lines
from hypocenter.doctor.report_parts import (
    COUNTED,
    HypothesisRow,
    Origin,
    compared_rows,
    count_of_others,
    environment_rows,
    fix_rows,
    headline,
    hypothesis_rows,
    preambles,
    proof_rows,
    run_rows,
    rungs_text,
    spots_of,
    subject_of,
    text_said,
    unseen_by_reason,
    what_to_attach,
    what_would_help,
    when_of,
)

_WIDTH = 100
_LABEL = 11


def report_text(
    diagnosis: Diagnosis, origin: Origin | None = None, *, show_all: bool = False
) -> str:
    """The report in lines of at most 100 columns, but for paths.

    What is refuted and what was not tested are counted; with `show_all` they are told, and how
    long each check took.
    """
    lines = _text_lines(diagnosis, origin or Origin(), show_all)
    # A name of a bundle's may hold a line end, and no line of it may pass for one of ours.
    return "".join(line.replace("\n", "\\n") + "\n" for line in lines)


def _text_lines(diagnosis: Diagnosis, origin: Origin, show_all: bool) -> Iterator[str]:
    yield from _beginning_text(diagnosis)
    for number, root in enumerate(diagnosis.roots):
        if number:
            yield ""
            yield from _field("ALSO", "a second defect, with a proof of its own")
        yield from _root_text(root, origin)
    yield ""
    yield from _field("SYMPTOM", diagnosis.symptom)
    yield from _field("SURFACED", diagnosis.surfaced)
    for label, text in (
        *run_rows(diagnosis),
        *(("FOLLOWS", text) for text in diagnosis.consequences),
    ):
        yield from _field(label, text)
    for sight in diagnosis.sights:
        yield from _sight_text(sight)
    yield ""
    yield "HYPOTHESES"
    shown = [verdict for verdict in Verdict if show_all or verdict not in COUNTED]
    for row in hypothesis_rows(diagnosis, shown, text_said(diagnosis)):
        yield from _row_text(row, show_all)
    if not show_all:
        yield from _wrap(f"{count_of_others(diagnosis)} (--all shows them)", "  ", "  ")
    if diagnosis.unseen:
        yield ""
        yield "NOT SEEN"
        for text in unseen_by_reason(diagnosis.unseen):
            yield from _wrap(text, "  - ", "    ")
    yield ""
    yield "ENVIRONMENT"
    for label, text in environment_rows(diagnosis.environment):
        yield from _wrap(text, f"  {label:<12}", " " * 14)
    if show_all:
        yield ""
        yield from _field("CHECKS", rungs_text(diagnosis))
    if diagnosis.has_symptom or not diagnosis.is_clean:
        yield ""
        yield from _field("ATTACH", what_to_attach(origin))


def _beginning_text(diagnosis: Diagnosis) -> Iterator[str]:
    """What stands before the first cause; all that is known where there is none."""
    if diagnosis.roots:
        for label, text in preambles(diagnosis):
            yield from _field(label, text)
        return
    yield from _field("CAUSE", headline(diagnosis))
    for number, text in enumerate(compared_rows(diagnosis)):
        yield from _field("" if number else "LOOK AT", text)
    for text in what_would_help(diagnosis):
        yield from _field("", text)


def _sight_text(sight: GpuSight) -> Iterator[str]:
    """Where a GPU stood, by its dump."""
    first, *rest = sight_lines(sight)
    yield from _field("GPU", first)
    if sight.text:
        yield f"{'':<{_LABEL}}    {sight.text}"
    for text in rest:
        yield from _field("", text)


def _root_text(root: RootCause, origin: Origin) -> Iterator[str]:
    yield from _field("CAUSE", f"{root.cause}{subject_of(root)}")
    yield from _field("", root.sentence)
    for spot in spots_of(root):
        yield f"{spot.label.upper():<{_LABEL}}{spot.place}"
        if spot.text:
            yield f"{'':<{_LABEL}}    {spot.text}"
    yield from _field("FIX", root.fix)
    for label, text in fix_rows(root):
        yield from _field(label.upper(), text)
    if (when := when_of(root, origin)) is not None:
        yield f"{'WHEN':<{_LABEL}}{when.launch}"
        if when.command:
            yield f"{'REPLAY':<{_LABEL}}{when.command}"
    yield ""
    for number, (label, told) in enumerate(proof_rows(root)):
        yield from _field("" if number else "PROOF", f"{label:<8}{told}", hang=8)


def _row_text(row: HypothesisRow, show_all: bool) -> Iterator[str]:
    where = f" ({row.where})" if row.where else ""
    by = f"  [{row.diagnostic}]" if row.diagnostic and show_all else ""
    yield from _wrap(f"{', '.join(row.causes)}{where}{by}", f"  {row.verdict:<13}", " " * 15)
    for text in row.evidence:
        yield from _wrap(text, " " * 15, " " * 17)
    if row.would_refute and row.verdict is not Verdict.REFUTED:
        yield from _wrap(f"would refute it: {row.would_refute}", " " * 15, " " * 17)


def _field(label: str, text: str, hang: int = 0) -> Iterator[str]:
    yield from _wrap(text, f"{label:<{_LABEL}}", " " * (_LABEL + hang))


def _wrap(text: str, first: str, rest: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]
