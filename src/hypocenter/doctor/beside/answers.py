"""Whether requests had the same answers in two runs: their tokens, and what was made of these."""

from __future__ import annotations

from hypocenter.doctor.difference import Answers
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.engine_events import Answered, TextAsked
from hypocenter.record.events import Stepped
from hypocenter.record.keyed_digest import are_comparable


def answers_of(good: BundleIndex, bad: BundleIndex) -> Answers:
    """Whether the requests that ended have the same tokens in both runs, all of them.

    One that failed has another answer than one that did not.
    """
    return _compare(good, bad, "digest")


def texts_of_answers(good: BundleIndex, bad: BundleIndex) -> Answers:
    """Whether they were told the same text, thoughts and calls of tools."""
    return _compare(good, bad, "said")


def was_asked_alike(good: BundleIndex, bad: BundleIndex) -> bool:
    """Whether both runs were given the same texts and conversations, and some."""
    sides = [[event.digest for event in index.events_of(TextAsked)] for index in (good, bad)]
    return (
        bool(sides[0])
        and sides[0] == sides[1]
        and all(are_comparable(*pair) for pair in zip(*sides, strict=True))
    )


def had_the_same_prompts(good: BundleIndex, bad: BundleIndex) -> bool:
    """Whether each request of `bad` began with the tokens that it began with in `good`.

    False where it is not known: with no request, or with digests of two keys.
    """
    sides = [_first_digests(index) for index in (good, bad)]
    return bool(sides[1]) and all(
        are_comparable(was := sides[0].get(number, ""), digest) and was == digest
        for number, digest in sides[1].items()
    )


def _first_digests(index: BundleIndex) -> dict[int, str]:
    """That of each request's tokens in the first step that has it."""
    found: dict[int, str] = {}
    for event in index.events_of(Stepped):
        for request in event.requests:
            found.setdefault(request.id, request.digest)
    return found


def _compare(good: BundleIndex, bad: BundleIndex, field: str) -> Answers:
    sides = [{event.request: event for event in index.events_of(Answered)} for index in (good, bad)]
    if not sides[0] or sides[0].keys() != sides[1].keys():
        return Answers.UNKNOWN
    both = [(one, sides[1][number]) for number, one in sides[0].items()]
    if any(one.failed != other.failed for one, other in both):
        return Answers.DIFFERENT
    pairs = [(getattr(one, field), getattr(other, field)) for one, other in both]
    if not all(are_comparable(one, other) for one, other in pairs):
        return Answers.UNKNOWN
    return Answers.SAME if all(one == other for one, other in pairs) else Answers.DIFFERENT
