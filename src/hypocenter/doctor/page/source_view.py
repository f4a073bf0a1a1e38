"""A kernel's recorded source with the line that goes wrong, and what stood in it there.

Reads the text as text: nothing of it is parsed or run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.page.markup import Html, escape_text, join_html, place_of_file, tag
from hypocenter.record.events import LaunchRecord, ScalarValue, SourceRecord
from hypocenter.replay.findings import Finding

#: A function of so many lines is shown whole; of others so many around the line.
_WHOLE_LINES, _LINES_BEFORE, _LINES_AFTER = 30, 14, 8
_MAX_CHARS = 400
_MAX_VALUES = 16
_WORDS = re.compile(
    r"(?P<comment>#.*)"
    r"|(?P<string>\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?)"
    r"|(?P<keyword>\b(?:and|as|assert|break|continue|def|elif|else|False|for|from|if|import|in|is"
    r"|lambda|None|not|or|pass|return|True|while|with)\b|@[\w.]+)"
    r"|(?P<number>\b\d[\w.]*)"
)


@dataclass(frozen=True, slots=True)
class SourceMark:
    """A line that goes wrong at `expression`, and the finding that was made there."""

    file: str
    line: int
    expression: str
    finding: Finding | None = None

    @property
    def place(self) -> tuple[str, int]:
        return self.file, self.line


@dataclass(frozen=True, slots=True)
class SourceView:
    """Lines of one function with marks, the foremost first; `num_above` and `num_below` are not
    shown."""

    function: str
    first_line: int
    lines: tuple[str, ...]
    num_above: int
    num_below: int
    marks: tuple[SourceMark, ...]


def source_views(
    case: Case, launch: LaunchRecord | None, marks: Sequence[SourceMark]
) -> Iterator[SourceView]:
    """A view for each function that has a mark; none where no text of it was recorded."""
    grouped: dict[str, tuple[SourceRecord, list[SourceMark]]] = {}
    for mark in marks:
        source = _source_with(case, launch, mark.file, mark.line)
        if source is not None:
            grouped.setdefault(source.id, (source, []))[1].append(mark)
    for source, own in grouped.values():
        lines = source.text.expandtabs(4).splitlines()
        low, high = 0, len(lines)
        if len(lines) > _WHOLE_LINES:
            at = [mark.line - source.first_line for mark in own]
            low = max(0, min(at) - _LINES_BEFORE)
            high = min(len(lines), max(at) + _LINES_AFTER + 1, low + 2 * _WHOLE_LINES)
        yield SourceView(
            source.function,
            source.first_line + low,
            tuple(lines[low:high]),
            low,
            len(lines) - high,
            tuple(own),
        )


def source_html(view: SourceView) -> Html:
    """The lines with their numbers; below a wrong one what the example lane had there."""
    rows: list[str] = []
    marks = {mark.line: mark for mark in reversed(view.marks)}
    if view.num_above:
        rows.append(_lines_left_out(view.num_above, "above"))
    for number, text in enumerate(view.lines, view.first_line):
        mark = marks.get(number)
        code = _mark_expression(text, mark.expression) if mark else colour(text[:_MAX_CHARS])
        kind = "bad" if mark else "line"
        rows.append(tag("div", tag("i", str(number)), tag("code", code or " "), class_=kind))
        if mark is not None and mark.finding is not None:
            rows.append(lane_html(mark.finding))
    if view.num_below:
        rows.append(_lines_left_out(view.num_below, "below"))
    first = view.marks[0]
    sites = first.finding.sites[1:] if first.finding is not None else ()
    calls = [
        tag(
            "p",
            "called from ",
            place_of_file(f"{site.file}:{site.line}"),
            ": ",
            tag("code", site.expression),
            class_="call",
        )
        for site in sites
    ]
    where = (place_of_file(f"{first.file}:{first.line}"), f" in {view.function}")
    return tag(
        "figure",
        tag("figcaption", *where),
        tag("div", *rows, class_="source", tabindex=0),
        *calls,
    )


def lane_html(finding: Finding) -> Html:
    """Program, lane and the values there, as one line under the code."""
    what = f"{finding.kind} at {finding.argument}" if finding.argument else str(finding.kind)
    parts: list[str] = [tag("strong", what)]
    if finding.program is not None:
        parts.append(tag("b", f"program {_tuple(finding.program)}"))
    if finding.lane:
        parts.append(tag("b", f"lane {_tuple(finding.lane)}"))
    values = list(finding.values.items())[:_MAX_VALUES]
    parts += [tag("span", f"{name} = {number_text(value)}") for name, value in values]
    return tag("div", *parts, class_="lane")


def number_text(value: ScalarValue) -> str:
    """A number as it is read."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def colour(text: str) -> Html:
    """A line of Python with a class for each kind of word; a string over lines has none."""
    return join_html(_colour_words(text))


def _colour_words(text: str) -> Iterator[Html]:
    end = 0
    for match in _WORDS.finditer(text):
        yield escape_text(text[end : match.start()])
        yield tag("span", match[0], class_=f"w-{match.lastgroup}")
        end = match.end()
    yield escape_text(text[end:])


def _mark_expression(text: str, expression: str) -> Html:
    """The line with the faulty expression marked, where it stands in it as it is."""
    text = text[:_MAX_CHARS]
    before, found, after = text.partition(expression) if expression else (text, "", "")
    if not found:
        return colour(text)
    return join_html((colour(before), tag("mark", colour(found)), colour(after)))


def _source_with(
    case: Case, launch: LaunchRecord | None, file: str, line: int
) -> SourceRecord | None:
    """The function of that file with that line: the launch's own, one that it calls, or any."""
    own = case.sources.get(launch.source) if launch is not None else None
    callees = [case.sources[key] for key in own.callees if key in case.sources] if own else []
    for source in (*([own] if own else []), *callees, *case.sources.values()):
        num_lines = len(source.text.splitlines())
        if source.file == file and 0 <= line - source.first_line < num_lines:
            return source
    return None


def _lines_left_out(number: int, where: str) -> Html:
    lines = "line" if number == 1 else "lines"
    return tag("div", tag("i", "⋮"), tag("code", f"{number} {lines} {where}"), class_="elided")


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"
