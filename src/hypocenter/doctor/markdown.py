"""A Diagnosis as Markdown, to be put into an issue; `report.py` has it as text. Decides nothing.

Names and messages come from a bundle of anyone's making: no character of theirs is markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from hypocenter.doctor.diagnosis import Diagnosis, RootCause, Verdict
from hypocenter.doctor.gpu_sight import sight_lines
from hypocenter.doctor.report_parts import (
    COUNTED,
    HypothesisRow,
    compared_rows,
    count_of_others,
    environment_rows,
    fix_rows,
    headline,
    hypothesis_rows,
    proof_rows,
    run_rows,
    spots_of,
    subject_of,
    text_said,
    unseen_by_reason,
)

#: Each of these may begin markup: emphasis, code, links, images, tags, headings, cells, entities.
_MARKUP = re.compile(r"[\\`*_\[\]<>#|~!&]")


def report_markdown(diagnosis: Diagnosis) -> str:
    """The report; what is refuted and what was not tested is folded away."""
    return "\n".join(_lines(diagnosis)) + "\n"


def plain(text: str) -> str:
    """One line in which every character stands for itself."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def code(text: str) -> str:
    """The text as code; its own backticks end none of it."""
    line = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{line}{space}{fence}"


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"# {plain(headline(diagnosis))}"
    for root in diagnosis.roots:
        yield ""
        yield from _root(root)
    if compared := compared_rows(diagnosis):
        yield ""
        yield f"**Look at.** {plain('. '.join(compared))}."
    yield ""
    yield f"**Symptom.** {plain(diagnosis.symptom)}"
    yield ""
    yield f"**Where it surfaced.** {plain(diagnosis.surfaced)}"
    if diagnosis.runs:
        yield ""
        yield from _table(("run", ""), run_rows(diagnosis))
    for text in diagnosis.consequences:
        yield ""
        yield f"**Follows from it.** {plain(text)}"
    for sight in diagnosis.sights:
        yield ""
        yield f"**The GPU.** {plain('; '.join(sight_lines(sight)))}"
    said = text_said(diagnosis)
    told = [verdict for verdict in Verdict if verdict not in COUNTED]
    if rows := hypothesis_rows(diagnosis, told, said):
        yield ""
        yield from _hypotheses(rows)
    if rows := hypothesis_rows(diagnosis, COUNTED, said):
        yield ""
        yield f"<details><summary>{count_of_others(diagnosis)}</summary>"
        yield ""
        yield from _hypotheses(rows)
        yield ""
        yield "</details>"
    if diagnosis.unseen:
        yield ""
        yield "**Not seen.**"
        yield ""
        yield from (f"- {plain(text)}" for text in unseen_by_reason(diagnosis.unseen))
    yield ""
    yield from _table(("environment", ""), environment_rows(diagnosis.environment))


def _root(root: RootCause) -> Iterator[str]:
    yield f"**{root.cause}**{plain(subject_of(root))}. {plain(root.sentence)}."
    yield ""
    for spot in spots_of(root):
        text = code(spot.text) if spot.is_code else plain(spot.text)
        yield f"**{spot.label}** {code(spot.place)}{f': {text}' if spot.text else ''}"
        yield ""
    yield f"**Fix.** {plain(root.fix)}."
    yield ""
    for label, text in fix_rows(root):
        yield f"**{label}.** {plain(text)}."
        yield ""
    yield from _table(("proof", ""), proof_rows(root))


def _hypotheses(rows: Sequence[HypothesisRow]) -> Iterator[str]:
    yield "| verdict | cause | kernel, argument | evidence |"
    yield "|---|---|---|---|"
    for row in rows:
        evidence = "<br>".join(map(plain, row.evidence))
        yield f"| {row.verdict} | {', '.join(row.causes)} | {plain(row.where)} | {evidence} |"


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield f"| {head[0]} | {head[1]} |"
    yield "|---|---|"
    for label, text in rows:
        yield f"| {label} | {plain(text)} |"
