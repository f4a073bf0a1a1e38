"""A Diagnosis as text for a terminal, as Markdown and as JSON; decides nothing.

The first lines are what to do at three in the morning: cause, kernel, argument, line, fix.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import msgspec

from hypocenter.diagnosis import Diagnosis, Hypothesis, RootCause, Verdict

_WIDTH = 100
_LABEL = 11


def report_text(diagnosis: Diagnosis) -> str:
    """The report in lines of at most 100 columns, but for paths."""
    return "\n".join(_text_lines(diagnosis)) + "\n"


def report_json(diagnosis: Diagnosis) -> str:
    return msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode() + "\n"


def report_markdown(diagnosis: Diagnosis) -> str:
    return "\n".join(_markdown_lines(diagnosis)) + "\n"


def headline(diagnosis: Diagnosis) -> str:
    """One line: the first root cause, or that there is none."""
    if diagnosis.roots:
        root = diagnosis.roots[0]
        return f"{root.cause}{_of(root)}"
    confirmed = [one for one in diagnosis.hypotheses if one.verdict is Verdict.CONFIRMED]
    if confirmed:
        return f"no root cause is proven; confirmed: {', '.join(one.cause for one in confirmed)}"
    if diagnosis.symptom.startswith("no symptom"):
        return "nothing found"
    return "no root cause is proven"


# -- text -----------------------------------------------------------------------------------------


def _text_lines(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.roots:
        yield from _field("CAUSE", headline(diagnosis))
    for number, root in enumerate(diagnosis.roots):
        if number:
            yield ""
            yield from _field("ALSO", "a second defect, with a proof of its own")
        yield from _root_text(root)
    yield ""
    yield from _field("SYMPTOM", diagnosis.symptom)
    yield from _field("SURFACED", diagnosis.surfaced)
    for text in diagnosis.consequences:
        yield from _field("FOLLOWS", text)
    yield ""
    yield "HYPOTHESES"
    for verdict in Verdict:
        same = [one for one in diagnosis.hypotheses if one.verdict is verdict]
        if verdict is Verdict.NOT_TESTED:
            yield from _untested_text(same)
        else:
            for one in same:
                yield from _hypothesis_text(one)
    if diagnosis.unseen:
        yield ""
        yield "NOT SEEN"
        for text in diagnosis.unseen:
            yield from _wrapped(text, "  - ", "    ")
    yield ""
    yield from _field("RUNGS", _rungs(diagnosis))


def _root_text(root: RootCause) -> Iterator[str]:
    yield from _field("CAUSE", f"{root.cause}{_of(root)}")
    yield from _field("", root.sentence)
    if root.file:
        yield f"{'LINE':<{_LABEL}}{root.file}:{root.line}"
        if root.expression:
            yield f"{'':<{_LABEL}}    {root.expression}"
    if root.place is not None:
        place = root.place
        yield f"{'WHEN':<{_LABEL}}step {place.step}, launch {place.launch}"
        yield f"{'REPLAY':<{_LABEL}}hypo replay BUNDLE --step {place.step} --launch {place.launch}"
    yield from _field("FIX", root.fix)
    yield ""
    yield from _field("PROOF", f"red    {root.proof.red}", hang=7)
    yield from _field("", f"fact   {root.proof.corrected}", hang=7)
    yield from _field("", f"green  {root.proof.green}", hang=7)


def _of(root: RootCause) -> str:
    named = f": argument {root.argument}" if root.argument else ""
    if root.argument and root.tensor and root.tensor != root.argument:
        named += f" (tensor {root.tensor})"
    return f"{named}{' of' if named else ':'} kernel {root.kernel}" if root.kernel else named


def _hypothesis_text(one: Hypothesis) -> Iterator[str]:
    where = ", ".join(filter(None, (one.kernel, one.argument)))
    named = f" ({where})" if where else ""
    by = f"  [{one.diagnostic}]" if one.diagnostic else ""
    yield f"  {one.verdict:<13}{one.cause}{named}{by}"
    for text in one.evidence:
        yield from _wrapped(text, " " * 15, " " * 17)
    if one.would_refute and one.verdict is not Verdict.REFUTED:
        yield from _wrapped(f"would refute it: {one.would_refute}", " " * 15, " " * 17)


def _untested_text(same: list[Hypothesis]) -> Iterator[str]:
    """Those with the same reason together: there may be many."""
    by_reason: dict[tuple[str, ...], list[str]] = {}
    for one in same:
        by_reason.setdefault(one.evidence, []).append(str(one.cause))
    for reason, causes in by_reason.items():
        yield from _wrapped(f"{', '.join(causes)}", f"  {Verdict.NOT_TESTED:<13}", " " * 15)
        for text in reason:
            yield from _wrapped(text, " " * 15, " " * 17)


def _field(label: str, text: str, hang: int = 0) -> Iterator[str]:
    yield from _wrapped(text, f"{label:<{_LABEL}}", " " * (_LABEL + hang))


def _wrapped(text: str, first: str, rest: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]  # fmt: skip


def _rungs(diagnosis: Diagnosis) -> str:
    shown = [
        f"{one.name} ({one.left_out})"
        if one.left_out
        else f"{one.name} {one.seconds * 1000:.0f} ms"
        for one in diagnosis.rungs
    ]
    return f"{', '.join(shown)}; {diagnosis.seconds:.2f} s in all"


# -- Markdown -------------------------------------------------------------------------------------


def _markdown_lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"# {headline(diagnosis)}"
    for root in diagnosis.roots:
        yield ""
        yield from _root_markdown(root)
    yield ""
    yield f"**Symptom.** {diagnosis.symptom}"
    yield ""
    yield f"**Where it surfaced.** {diagnosis.surfaced}"
    for text in diagnosis.consequences:
        yield ""
        yield f"**Follows from it.** {text}"
    yield ""
    yield "| verdict | cause | kernel, argument | evidence |"
    yield "|---|---|---|---|"
    for one in diagnosis.hypotheses:
        where = ", ".join(filter(None, (one.kernel, one.argument)))
        evidence = "<br>".join(map(_cell, one.evidence))
        yield f"| {one.verdict} | {one.cause} | {_cell(where)} | {evidence} |"
    if diagnosis.unseen:
        yield ""
        yield "**Not seen.**"
        yield from (f"- {text}" for text in diagnosis.unseen)
    yield ""
    yield f"Rungs: {_rungs(diagnosis)}."


def _root_markdown(root: RootCause) -> Iterator[str]:
    yield f"**{root.cause}**{_of(root)}. {root.sentence}."
    yield ""
    if root.file:
        yield f"`{root.file}:{root.line}`: `{root.expression}`"
        yield ""
    yield f"**Fix.** {root.fix}."
    yield ""
    yield "| proof | |"
    yield "|---|---|"
    yield f"| red | {_cell(root.proof.red)} |"
    yield f"| corrected | {_cell(root.proof.corrected)} |"
    yield f"| green | {_cell(root.proof.green)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
