"""Whose fault a difference is: the first point at which an op of ours or of the peer's is not what
float64 makes of its own inputs, or at which the two read other weights. Runs no model."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import Struct

from hypocenter.base.dtypes import Float64s
from hypocenter.engine.float64_steps import PRODUCTS, Float64Steps, NotComputed, limit_of
from hypocenter.trace.comparing import ROUNDING, PointDistance, distances, rms_of
from hypocenter.trace.points import ModelTrace, PointPlace, TracedStep, order_of

#: Who does not compute what float64 does; `weights`: both do, each by weights or facts of its own
#: that differ by more than their types explain; `unknown`: float64 did not judge it.
Whose = Literal["nobody", "ours", "theirs", "both", "weights", "unknown"]
#: Where float64 does not judge: a point is beyond rounding that is this much farther apart than all
#: points before it in its step, and its limit more.
_JUMP = 4.0


class FirstFault(Struct, frozen=True):
    """The first point that is wrong: how far the two are apart there, relative; how far each is
    from float64, relative to what the op adds (None: not asked); and what of the weights and facts
    that the op reads is not alike."""

    step: int
    name: str
    layer: int | None
    apart: float
    of_ours: float | None
    of_theirs: float | None
    limit: float
    unlike: tuple[str, ...] = ()


class ProductErrors(Struct, frozen=True):
    """How far products are from float64 on each side: the root mean square, relative to what each
    adds, of those that were judged before a fault."""

    num_points: int
    of_ours: float
    of_theirs: float


class PeerVerdict(Struct, frozen=True):
    """What was found. `growth` are layers and how far what they give is apart, in the step of the
    fault; `farthest` is the point at which the two are farthest apart of all."""

    whose: Whose
    first: FirstFault | None
    growth: tuple[tuple[int, float], ...]
    farthest: PointDistance | None
    logits_apart: float | None
    num_logit_rows: int
    num_same_top: int
    num_points: int
    #: Points that differ beyond rounding, up to the first fault, and how many were judged.
    num_differing: int
    num_judged: int
    #: The first point before the fault, or of all, that was not judged and is farther apart than
    #: what comes before it explains.
    not_explained: FirstFault | None
    #: Names of points that the peer does not have, in some layer or in all.
    missing: tuple[str, ...]
    not_judged: str
    products: ProductErrors


@dataclass(frozen=True)
class Judges:
    """Float64 by the weights that each side reads, and what of these is not alike at an op; the
    last one is () for a peer that was given the same file."""

    ours: Float64Steps
    theirs: Float64Steps
    unlike: Callable[[str, int | None], tuple[str, ...]]
    attention_limit: float


def judge(
    ours: ModelTrace,
    theirs: ModelTrace,
    judges: Judges | None,
    reason: str = "",
    progress: Callable[[str, float], None] = lambda what, share: None,
) -> PeerVerdict:
    """Compare and judge. `reason` says why there are no judges."""
    pairs = list(zip(ours.steps, theirs.steps, strict=True))
    apart = {
        (each.step, each.place): each for one, other in pairs for each in distances(one, other)
    }
    whose: Whose = "nobody"
    first, num_differing = None, 0
    of_products: list[tuple[float, float]] = []
    not_judged: dict[tuple[int, PointPlace], str] = {}
    places = _places(pairs)
    for number, place in enumerate(places):
        progress(f"comparing with float64: {place[0]}", number / len(places))
        for step in (differing := _differing(pairs, place, apart)):
            num_differing += 1
            try:
                if judges is None:
                    raise NotComputed(reason)
                errors = _errors(judges, differing[step], place)
                whose, first = _at(judges, errors, apart[step, place])
                if first is None and place[0] in PRODUCTS:
                    of_products.append(errors)
            except NotComputed as error:
                not_judged[step, place] = str(error)
            if first is not None:
                break
        if first is not None:
            break
    not_explained = _jump(pairs, apart, not_judged)
    if first is None and not_explained is not None:
        whose, first = "unknown", not_explained
    if not_explained is not None:
        reason = not_judged[not_explained.step, (not_explained.name, not_explained.layer)]
    reason = reason or next(iter(not_judged.values()), "")
    return PeerVerdict(
        whose,
        first,
        _growth(apart, first.step if first else 0),
        max(apart.values(), key=lambda each: each.relative, default=None),
        max((each.relative for each in apart.values() if each.name == "logits"), default=None),
        *_tops(pairs),
        len(apart),
        num_differing,
        num_differing - len(not_judged),
        not_explained,
        tuple(sorted({name for name, _ in _only_ours(pairs)})),
        reason,
        ProductErrors(len(of_products), *(rms_of(side) for side in _sides(of_products))),
    )


def _sides(errors: Sequence[tuple[float, float]]) -> tuple[Float64s, Float64s]:
    found = np.array(errors, np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _places(pairs: list[tuple[TracedStep, TracedStep]]) -> list[PointPlace]:
    """Points that both have, in order."""
    both = {place for ours, theirs in pairs for place in ours.points.keys() & theirs.points.keys()}
    return sorted(both, key=order_of)


def _only_ours(pairs: list[tuple[TracedStep, TracedStep]]) -> set[PointPlace]:
    return {place for ours, theirs in pairs for place in ours.points.keys() - theirs.points.keys()}


def _differing(
    pairs: list[tuple[TracedStep, TracedStep]],
    place: PointPlace,
    apart: dict[tuple[int, PointPlace], PointDistance],
) -> dict[int, tuple[TracedStep, TracedStep]]:
    """Steps in which the two differ at a point by more than rounding."""
    found = {}
    for ours, theirs in pairs:
        distance = apart.get((ours.step, place))
        if distance is not None and (distance.what or not distance.relative <= ROUNDING):
            found[ours.step] = ours, theirs
    return found


def _errors(
    judges: Judges, pair: tuple[TracedStep, TracedStep], place: PointPlace
) -> tuple[float, float]:
    """How far a point of a step is from float64 on each side. Raises NotComputed."""
    return judges.ours.error(pair[0], *place), judges.theirs.error(pair[1], *place)


def _at(
    judges: Judges, errors: tuple[float, float], distance: PointDistance
) -> tuple[Whose, FirstFault | None]:
    """What float64 says of a point of a step. Raises NotComputed."""
    name, layer = distance.place
    limits = limit_of(name), judges.attention_limit if name == "attention" else limit_of(name)
    is_off = [not error <= limit for error, limit in zip(errors, limits, strict=True)]
    unlike = () if any(is_off) else judges.unlike(name, layer)
    if not any(is_off) and not unlike:
        return "nobody", None
    whose: Whose = "both" if all(is_off) else "ours" if is_off[0] else "theirs"
    fault = FirstFault(distance.step, name, layer, distance.relative, *errors, limits[1], unlike)
    return whose if any(is_off) else "weights", fault


def _jump(
    pairs: list[tuple[TracedStep, TracedStep]],
    apart: dict[tuple[int, PointPlace], PointDistance],
    not_judged: Container[tuple[int, PointPlace]],
) -> FirstFault | None:
    """The first point of those that is farther apart than what comes before it explains."""
    for ours, theirs in pairs:
        farthest = 0.0
        for place in _places([(ours, theirs)]):
            distance = apart[ours.step, place]
            limit = limit_of(place[0]) + _JUMP * farthest
            is_far = distance.what or not distance.relative <= limit
            if is_far and (ours.step, place) in not_judged:
                return FirstFault(ours.step, *place, distance.relative, None, None, limit)
            farthest = max(farthest, distance.relative)
    return None


def _growth(
    apart: dict[tuple[int, PointPlace], PointDistance], step: int
) -> tuple[tuple[int, float], ...]:
    return tuple(
        (each.layer, each.relative)
        for each in apart.values()
        if each.step == step and each.name == "layer_out" and each.layer is not None
    )


def _tops(pairs: list[tuple[TracedStep, TracedStep]]) -> tuple[int, int]:
    """Rows of logits that both have, and in how many of them the most likely token is the same."""
    num = same = 0
    for ours, theirs in pairs:
        of_both = [step.points.get(("logits", None)) for step in (ours, theirs)]
        rows = [point.values for point in of_both if point is not None and point.values is not None]
        if len(rows) == 2 and rows[0].shape == rows[1].shape:
            num += len(rows[0])
            same += int(np.sum(rows[0].argmax(-1) == rows[1].argmax(-1)))
    return num, same
