"""The part of a page behind the cause: how it showed, other causes, what was not seen, the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hypocenter.base.wording import count_text
from hypocenter.doctor.diagnosis import Diagnosis, Verdict
from hypocenter.doctor.gpu_sight import sight_lines
from hypocenter.doctor.page.markup import Html, escape_text, join_html, prose, tag
from hypocenter.doctor.report_parts import (
    COUNTED,
    HypothesisRow,
    Origin,
    compared_rows,
    count_of_others,
    environment_rows,
    hypothesis_rows,
    rungs_text,
    text_said,
    unseen_by_reason,
    what_to_attach,
)
from hypocenter.record.bundle import Bundle

#: Of stderr its end is told, and of the kernel's log.
_MAX_STDERR_CHARS, _MAX_LOG_LINES = 6000, 20


def how_it_showed(bundle: Bundle, diagnosis: Diagnosis) -> Iterator[Html]:
    """Symptom, where it surfaced, where GPUs stood, and the end of stderr."""
    yield tag("h2", "How it showed")
    yield tag("p", sentence(diagnosis.symptom))
    yield tag("p", tag("b", "Where it surfaced. "), sentence(diagnosis.surfaced))
    for text in diagnosis.consequences:
        yield tag("p", tag("b", "Follows from it. "), sentence(text))
    for number, text in enumerate(compared_rows(diagnosis)):
        yield tag("p", "" if number else tag("b", "Look at. "), sentence(text))
    for sight in diagnosis.sights:
        first, *rest = sight_lines(sight)
        yield tag("p", tag("b", "The GPU. "), prose(f"{first}."))
        yield from (tag("p", prose(text), class_="note") for text in rest)
    if stderr := bundle.stderr.strip():
        text = escape_text(stderr[-_MAX_STDERR_CHARS:], keep_lines=True)
        yield fold("What it printed to stderr at the end", [tag("pre", text)])
    if bundle.kernel_log:
        log = escape_text("\n".join(bundle.kernel_log[-_MAX_LOG_LINES:]), keep_lines=True)
        yield fold("What the system's kernel logged", [tag("pre", log)])


def the_rest(diagnosis: Diagnosis, origin: Origin) -> Iterator[Html]:
    """Other causes, what was not seen, the environment: folded, for who wants to know."""
    yield tag("h2", "What else was looked at")
    said = text_said(diagnosis)
    told = [verdict for verdict in Verdict if verdict not in COUNTED]
    if rows := hypothesis_rows(diagnosis, told, said):
        yield fold(f"{count_text(len(rows), 'cause')} with evidence", map(_cause, rows))
    if rows := hypothesis_rows(diagnosis, COUNTED, said):
        yield fold(count_of_others(diagnosis), map(_cause, rows))
    if diagnosis.unseen:
        unseen = list(unseen_by_reason(diagnosis.unseen))
        items = tag("ul", *(tag("li", prose(text)) for text in unseen))
        yield fold(f"{count_text(len(unseen), 'thing')} not seen", [items])
    rows_of_run = list(environment_rows(diagnosis.environment))
    rows_of_run.append(("checks", rungs_text(diagnosis)))
    pairs = (join_html((tag("dt", label), tag("dd", text))) for label, text in rows_of_run)
    yield fold("The run and its environment", [tag("dl", *pairs)])
    if diagnosis.has_symptom or not diagnosis.is_clean:
        yield tag("p", prose(f"Attach {what_to_attach(origin)}."), class_="note")


def sentence(text: str) -> Html:
    """The text as a sentence of its own; a name at its beginning stays as it is written."""
    first = text.split(" ", 1)[0]
    is_word = first.rstrip(",:;").isalpha() and not first.endswith(":")
    begin = text[:1].upper() if is_word else text[:1]
    return prose(f"{begin}{text[1:]}{'' if text.rstrip()[-1:] in '.!?' else '.'}")


def fold(summary: str, parts: Iterable[str]) -> Html:
    """Parts that are shown when somebody asks."""
    return tag("details", tag("summary", summary), *parts)


def _cause(row: HypothesisRow) -> Html:
    where = tag("span", f" ({row.where})", class_="note") if row.where else ""
    evidence = tag("ul", *(tag("li", prose(text)) for text in row.evidence)) if row.evidence else ""
    refute = ""
    if row.would_refute and row.verdict is not Verdict.REFUTED:
        refute = tag("p", prose(f"Would refute it: {row.would_refute}"), class_="note")
    verdict = tag("span", str(row.verdict), class_=f"verdict {row.verdict.name}")
    return tag(
        "div", verdict, tag("b", ", ".join(row.causes)), where, evidence, refute, class_="cause"
    )
