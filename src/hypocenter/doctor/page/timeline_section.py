"""The part of a page about the end of a run: its last launches, copies and allocations."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import RootCause
from hypocenter.doctor.page.markup import Html, join_html, place_of_file, prose, shorten, tag
from hypocenter.doctor.page.timeline import Kind, Moment, moments

#: Moments that are kept, and of them those at the end and around the blamed launch that are shown.
_MAX_KEPT, _NUM_LAST, _NUM_AROUND = 400, 18, 3
_TEXT_CHARS = 160


def timeline_html(case: Case, root: RootCause | None) -> Html:
    """Nothing where nothing was recorded."""
    place = root.place if root is not None else None
    blamed: Moment | None = None
    kept: collections.deque[Moment] = collections.deque(maxlen=_MAX_KEPT)
    num = 0
    for moment in moments(case):
        num += 1
        kept.append(moment)
        if place is not None and moment.place == place:
            blamed = moment
    if not kept:
        return Html()
    rows = list(kept)
    if blamed is not None and blamed not in rows:
        rows[0] = blamed
    shown = _rows_shown(rows, blamed)
    note = "In the order in which the host did it; a run has no clock."
    if any(moment.is_under_way for moment in rows):
        note += " A bar on the left: it may not have ended when the fault came."
    first = tag("ol", *_rows(rows, shown, blamed), class_="time")
    parts = [tag("h2", "The end of the run"), tag("p", note, class_="note"), first]
    if len(shown) < len(rows):
        every = tag("ol", *_rows(rows, set(range(len(rows))), blamed), class_="time")
        summary = tag("summary", f"The last {len(rows)} of {num} things that were done")
        parts.append(tag("details", summary, every))
    return join_html(parts)


def _rows_shown(rows: Sequence[Moment], blamed: Moment | None) -> set[int]:
    """The numbers of the rows that are shown at once."""
    shown = set(range(max(0, len(rows) - _NUM_LAST), len(rows)))
    if blamed is not None:
        at = rows.index(blamed)
        shown |= set(range(max(0, at - _NUM_AROUND), min(len(rows), at + _NUM_AROUND + 1)))
    return shown


def _rows(rows: Sequence[Moment], shown: set[int], blamed: Moment | None) -> Iterator[Html]:
    last = -1
    for number in sorted(shown):
        if number > last + 1:
            yield tag("li", f"{number - last - 1} more", class_="more")
        last = number
        yield _row(rows[number], rows[number] is blamed)


def _row(moment: Moment, is_blamed: bool) -> Html:
    way = " way" if moment.is_under_way else ""
    name = tag("b", prose(shorten(moment.name, _TEXT_CHARS)))
    if moment.kind is Kind.LAUNCH and moment.place is not None and moment.place.plan >= 0:
        name = join_html((name, f" (launch {moment.place.launch})"))
    stream = f", stream {moment.stream}" if moment.stream else ""
    told = shorten(" ".join(moment.text.split()), _TEXT_CHARS)
    text = prose(f" {told}{stream}" if told or stream else "")
    site = tag("small", place_of_file(moment.site)) if moment.site else ""
    return tag(
        "li",
        tag("span", str(moment.step), class_="n"),
        tag("span", "here" if is_blamed else str(moment.kind), class_="k"),
        " ",
        tag("span", name, text, " ", site, class_="t"),
        class_=f"{moment.kind}{' blamed' if is_blamed else ''}{way}",
    )
