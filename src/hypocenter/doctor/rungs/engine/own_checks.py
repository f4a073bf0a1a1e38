"""Rung: checks of the engine's own Python that did not hold, and operations of it that failed.

An assertion says what must be so of the bookkeeping that its module does; where it does not hold,
that bookkeeping is wrong already. What the module keeps book of is the class of the defect.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, Proof, RootCause, proven
from hypocenter.record.events import Called, CodePlace

NAME = "own checks"


@dataclass(frozen=True, slots=True)
class _Book:
    """What a part of the package keeps book of, and what is wrong where that book is."""

    of: str
    cause: Cause


#: What is wrong with the statement itself, and with no book.
_OF_CODE = frozenset(
    {"AttributeError", "ImportError", "NameError", "TypeError", "UnboundLocalError"}
)
#: By the beginning of a module's name; the first that fits counts.
_BOOKS = {
    "engine.kv_cache": _Book("which request has which block", Cause.FOREIGN_BLOCK),
    "engine.block_archive": _Book("what blocks are kept with", Cause.KEPT_BLOCK_CHANGED),
    "engine.states": _Book("which request has which state", Cause.FOREIGN_STATE),
    "engine.batch": _Book("what a step is given", Cause.WRONG_INPUT),
    "engine.scheduler": _Book("which tokens a step runs", Cause.WRONG_INPUT),
    "engine.request": _Book("how far a request has come", Cause.WRONG_INPUT),
    "engine.runner": _Book("what a step is given", Cause.WRONG_INPUT),
    "engine.sampler": _Book("by what a token is chosen", Cause.WRONG_INPUT),
    "kernels.sampling": _Book("by what a token is chosen", Cause.WRONG_INPUT),
    # A plan has its own facts: what the callers of the planner keep is not what failed there.
    "model": _Book("which tensors and launches a layer has", Cause.BROKEN_CHECK),
}


def own_checks(case: Case) -> list[Claim]:
    """The first statement of the package that raised what it never raises on purpose."""
    for event in case.index.events_of(Called):
        if event.raised_in:
            return [_claim(case, event, event.raised_in)]
    return []


def _claim(case: Case, event: Called, places: tuple[CodePlace, ...]) -> Claim:
    place, book = places[0], _book_of(places) if event.call not in _OF_CODE else None
    is_check = place.text.startswith(("assert ", "raise "))
    does = "does not hold" if is_check else "fails"
    keeps = f", which keeps book of {book.of}" if book else ""
    text = f"{place.function} in {place.module}{keeps}: `{place.text}` {does} ({event.outcome})"
    num_before = sum(bool(step.requests) and step.step != event.step for step in case.steps)
    callers = tuple(
        f"called from {caller.function} ({caller.module}:{caller.line}): `{caller.text}`"
        for caller in places[1:]
    )
    root = RootCause(
        cause=book.cause if book else Cause.BROKEN_CHECK,
        blames=Blame.KERNEL,
        sentence=f"step {event.step}: {text}",
        fix=f"Look at what {place.function} was given, and who changed the book before: the line "
        "itself tells of it",
        proof=Proof(
            f"{place.file}:{place.line} raised {event.outcome}",
            "a book for which the check holds" if is_check else "values for which it succeeds",
            f"{count_text(num_before, 'step')} before ended without it, and this one did not",
        ),
        file=place.file,
        line=place.line,
        expression=place.text,
    )
    return proven(root, NAME, callers, "the same statement passing", event.seq)


def _book_of(places: tuple[CodePlace, ...]) -> _Book | None:
    """That of the innermost module which keeps one."""
    for place in places:
        for module, book in _BOOKS.items():
            if place.module == module or place.module.startswith(f"{module}."):
                return book
    return None
