"""An outcome as one HTML file: no script, nothing that is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from hypocenter.doctor.page.markup import Html, join_html, tag
from hypocenter.doctor.page.page import page_html
from hypocenter.verify.outcome import Stage, Verification


def outcome_html(outcome: Verification, verb: str) -> str:
    """The page of what a verb found."""
    title = f"{outcome.model} on {outcome.device}: {outcome.verdict}"
    header = tag(
        "header",
        tag("p", f"{verb} · {outcome.hardware}", class_="kicker"),
        tag("h1", title),
        tag("span", f"looked for {outcome.seconds:.0f} s ({outcome.effort})", class_="badge"),
    )
    main = tag("main", *(tag("section", *_section(stage)) for stage in outcome.stages))
    return page_html(title, join_html((header, main)))


def _section(stage: Stage) -> Iterator[Html]:
    yield tag("h2", f"{stage.name}: {stage.verdict}")
    yield tag("p", stage.asks.capitalize())
    if stage.num_all:
        covered = f"{stage.num_covered} of {stage.num_all} {stage.things}"
        yield tag("p", f"{covered}, {stage.num_checks} checks, {stage.seconds:.1f} s.")
    if stage.canary is not None:
        seen = f"{stage.canary.num_seen} of {stage.canary.num_planted}"
        yield tag("p", f"Planted: {stage.canary.planted}. Seen: {seen}.")
    for heading, lines in (
        ("Wrong", [f"{item.where}: {item.what}" for item in stage.findings]),
        ("Not looked at", [f"{item.what}: {item.why}" for item in stage.uncovered]),
    ):
        if lines:
            yield tag("h3", heading)
            yield tag("ul", *(tag("li", line) for line in lines))
