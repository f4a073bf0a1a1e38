"""What of two runs belongs together: steps by number, launches by their order, results by place,
draws by their step."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from hypocenter.doctor.difference import Difference, Pair
from hypocenter.record.bundle import Bundle
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.engine_events import Drawn
from hypocenter.record.events import AnyEvent, Launched, Place, Statistics, Stepped
from hypocenter.record.keyed_digest import are_comparable

#: What a draw depends on beside the logits: the tensor of a device, and its digests in a `Drawn`.
DRAWN_BY = {"masks": "masks", "biases": "biases", "output_counts": "counts"}
#: Launches of a plan beyond which they are taken one by one.
_MAX_ALIGNED = 1 << 12


def steps_of(index: BundleIndex) -> dict[int, list[Stepped | Launched]]:
    """By number, those left out that were launched ahead and then thrown away."""
    thrown = {event.step for event in index.events if _is_thrown_away(event)}
    steps: dict[int, list[Stepped | Launched]] = {}
    for event in index.events:
        if isinstance(event, Stepped | Launched) and event.step not in thrown:
            number = event.step - sum(step < event.step for step in thrown)
            steps.setdefault(number, []).append(event)
    return steps


def _is_thrown_away(event: AnyEvent) -> bool:
    """Whether all requests of a step had ended when its tokens were learned."""
    return (
        isinstance(event, Stepped)
        and bool(event.requests)
        and event.filled_by_device in [values.tensor for values in event.inputs]
        and not any(request.digest for request in event.requests)
    )


def draws_of(index: BundleIndex) -> dict[int, Drawn]:
    """What tokens were drawn by, by the step as it was recorded."""
    return {event.step: event for event in index.events_of(Drawn)}


def draw_pairs(
    step: int,
    draws: Sequence[dict[int, Drawn]],
    good: Sequence[Stepped | Launched],
    bad: Sequence[Stepped | Launched],
) -> Iterator[Pair]:
    """What the draws of a step depend on beside the logits, as far as it differs."""
    one, other = (
        side.get(events[0].step) if events else None
        for side, events in zip(draws, (good, bad), strict=True)
    )
    if one is None or other is None or len(one.requests) != len(other.requests):
        return
    facts = [
        Difference(
            step=step,
            what="input",
            subject=f"{tensor}[{row}]",
            good=pair[0].rpartition(":")[2][:12] or "none",
            bad=pair[1].rpartition(":")[2][:12] or "none",
            tensor=tensor,
        )
        for tensor, digests in DRAWN_BY.items()
        for row, pair in enumerate(
            zip(getattr(one, digests), getattr(other, digests), strict=False)
        )
        if _differ(*pair)
    ]
    # Of each the first row that differs: the others are alike.
    first = {fact.tensor: fact for fact in reversed(facts)}
    if first:
        yield Pair(step=step, facts=tuple(reversed(first.values())))


def _differ(good: str, bad: str) -> bool:
    """Whether one of them is there alone, or both are and can be compared."""
    return good != bad and (not (good and bad) or are_comparable(good, bad))


def statistics_by_place(bundle: Bundle) -> dict[Place, list[Statistics]]:
    """What was seen after each launch."""
    found: dict[Place, list[Statistics]] = {}
    for statistics in bundle.statistics:
        found.setdefault(statistics.place, []).append(statistics)
    return found


def align(names: Sequence[Sequence[str]]) -> Iterator[tuple[int | None, int | None]]:
    """Indices of two lists of kernels beside each other; None for what one of them has not."""
    good, bad = names
    if list(good) == list(bad) or max(len(good), len(bad)) > _MAX_ALIGNED:
        longest = max(len(good), len(bad))
        for i in range(longest):
            yield (i if i < len(good) else None), (i if i < len(bad) else None)
        return
    matcher = difflib.SequenceMatcher(None, good, bad, autojunk=False)
    for _, a, b, c, d in matcher.get_opcodes():
        for i in range(max(b - a, d - c)):
            yield (a + i if a + i < b else None), (c + i if c + i < d else None)
