"""The report as one HTML file: no script, nothing that is loaded, readable on a phone and on paper.

Puts the sections in order; each is made by a module of its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator

from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import Diagnosis, RootCause
from hypocenter.doctor.page.address_life import lives
from hypocenter.doctor.page.address_space import address_space
from hypocenter.doctor.page.cause_section import (
    launch_html,
    proof_html,
    sights_html,
    what_to_do,
    where_it_shows,
)
from hypocenter.doctor.page.example_access import ExampleAccess, example_of
from hypocenter.doctor.page.markup import Html, join_html, prose, tag
from hypocenter.doctor.page.memory_section import memory_html
from hypocenter.doctor.page.rest_section import how_it_showed, sentence, the_rest
from hypocenter.doctor.page.style import STYLE
from hypocenter.doctor.page.timeline_section import timeline_html
from hypocenter.doctor.report_parts import (
    Origin,
    headline,
    preambles,
    subject_of,
    what_would_help,
)
from hypocenter.record.bundle import Bundle


def report_html(
    bundle: Bundle, diagnosis: Diagnosis, origin: Origin, *, allow_source: bool = False
) -> str:
    """The report on a bundle as one page; `allow_source` as for `diagnose`.

    A cause that was proven without a replay is replayed here, for the values of one lane.
    """
    case = Case(bundle, allow_source=allow_source)
    case.sights = list(diagnosis.sights)
    body = join_html(
        (
            tag("header", *_header(diagnosis)),
            tag("main", *_causes(case, diagnosis, origin), *_story(case, diagnosis, origin)),
        )
    )
    return page_html(headline(diagnosis), body)


def page_html(title: str, body: Html) -> str:
    """A whole page of the house's style, which loads and runs nothing."""
    style = Html(STYLE)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(style)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", style),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def _policy(style: str) -> str:
    """Nothing may be loaded or run; of styles the one sheet of this page, by its digest."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _header(diagnosis: Diagnosis) -> Iterator[Html]:
    environment = diagnosis.environment
    ran = (environment.command, environment.device, environment.started)
    yield tag("p", " · ".join(("hypo doctor", *filter(None, ran))), class_="kicker")
    if not diagnosis.roots:
        yield tag("h1", prose(_capital(headline(diagnosis))))
        yield tag("span", "no cause is proven", class_="badge")
        yield from (tag("p", sentence(text)) for text in what_would_help(diagnosis))
        return
    root = diagnosis.roots[0]
    yield tag("h1", _capital(str(root.cause)))
    yield tag("p", _capital(subject_of(root).removeprefix(": ")), class_="subject")
    yield tag("span", "proven", class_="badge proven")
    for _, text in preambles(diagnosis):
        yield tag("p", tag("span", _capital(text), class_="badge open"))
    yield tag("p", sentence(root.sentence))


def _causes(case: Case, diagnosis: Diagnosis, origin: Origin) -> Iterator[Html]:
    for number, root in enumerate(diagnosis.roots):
        if number:
            yield tag("h2", f"Also: {root.cause}{subject_of(root)}")
            yield tag("p", sentence(root.sentence))
        yield what_to_do(case, root, origin)
        example = example_of(case, root) if not number else ExampleAccess(root.finding)
        yield where_it_shows(case, root, example)
        yield proof_html(root)
        if not number:
            yield _memory(case, root, example)
            yield launch_html(case, root)
    if not diagnosis.roots:
        yield from sights_html(case, diagnosis.sights)
        yield _memory(case, None, ExampleAccess())


def _memory(case: Case, root: RootCause | None, example: ExampleAccess) -> Html:
    space = address_space(case, root, example)
    return memory_html(space, lives(case, root, space))


def _story(case: Case, diagnosis: Diagnosis, origin: Origin) -> Iterator[Html]:
    yield timeline_html(case, diagnosis.roots[0] if diagnosis.roots else None)
    yield from how_it_showed(case.bundle, diagnosis)
    yield from the_rest(diagnosis, origin)


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
