"""Two traces side by side: the first point at which they part, and how far they are apart there
and behind it. Judges neither; `engine/float64_steps.py` computes what is right."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from hypocenter.base.dtypes import Float32s
from hypocenter.trace.points import ModelTrace, Point, PointPlace, TracedStep

#: Rounding of float32 sums, relative: what differs by less is told as rounding.
ROUNDING = 1e-5

#: The op that makes what a point holds.
OPS = {
    "embedding": "the lookup of tokens in token_embd",
    "attn_norm": "the norm before attention, attn_norm, of layer {layer}",
    "q": "the product with attn_q of layer {layer}",
    "k": "the product with attn_k of layer {layer}",
    "v": "the product with attn_v of layer {layer}",
    "q_rope": "the rotation of q by its positions in layer {layer}",
    "k_cache": "the rotation of k and its write to the cache in layer {layer}",
    "v_cache": "the write of v to the cache in layer {layer}",
    "attention": "attention (scores, mask, softmax, sum) of layer {layer}",
    "attn_residual": "the product with attn_output of layer {layer}",
    "ffn_norm": "the norm before the feed-forward, ffn_norm, of layer {layer}",
    "layer_out": "the feed-forward (ffn_gate, ffn_up, ffn_down) of layer {layer}",
    "result_norm": "the last norm, output_norm",
    "logits": "the product with the output matrix",
}


class PointDistance(Struct, frozen=True):
    """How far two tensors of one point are apart.

    `relative` is the root mean square of their differences over that of the first one; it is an
    estimate, good to a factor of 2, where `is_estimate`: the elements were not kept. `what` names
    what else is wrong: another shape, other NaN. `is_of_bits`: all numbers are equal, and only
    signs of zeros or payloads of NaN are not.
    """

    step: int
    name: str
    layer: int | None
    relative: float
    is_estimate: bool
    what: str = ""
    is_of_bits: bool = False

    @property
    def place(self) -> PointPlace:
        return self.name, self.layer

    @property
    def text(self) -> str:
        return self.name if self.layer is None else f"{self.name} of layer {self.layer}"

    @property
    def is_more_than_rounding(self) -> bool:
        return bool(self.what) or not self.relative <= ROUNDING


class TraceDiff(Struct, frozen=True):
    """What was found: `first`, whose bits differ first, `first_beyond`, the first that differs by
    more than rounding, and all points of the step of that one, in order.

    `unlike` says why what follows cannot be compared (other tokens, another chunk), `missing` are
    points and steps that only one of the two has.
    """

    num_steps: int
    num_points: int
    num_equal: int
    first: PointDistance | None
    first_beyond: PointDistance | None
    growth: tuple[PointDistance, ...]
    unlike: str = ""
    missing: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the two have nothing that could be compared."""
        return not self.num_points and not self.unlike

    @property
    def is_equal(self) -> bool:
        """Whether something was compared, and both have the same points with the same bits."""
        return bool(self.num_points) and not (self.first or self.unlike or self.missing)


def compare(a: ModelTrace, b: ModelTrace) -> TraceDiff:
    """Compare the steps that both have, in order, until their inputs are other ones."""
    first = first_beyond = None
    growth: tuple[PointDistance, ...] = ()
    num_steps = num_points = num_equal = 0
    missing: dict[str, None] = {}
    unlike = ""
    of_b = {step.step: step for step in b.steps}
    for step in a.steps:
        other = of_b.get(step.step)
        if other is None:
            continue
        if unlike := _unlike(step, other):
            break
        num_steps += 1
        found = list(distances(step, other))
        missing |= dict.fromkeys(_missing(step, other))
        num_points += len(found)
        differing = [each for each in found if each.relative or each.what or each.is_of_bits]
        num_equal += len(found) - len(differing)
        first = first or next(iter(differing), None)
        if first_beyond is None:
            first_beyond = next((each for each in differing if each.is_more_than_rounding), None)
            if first_beyond is not None or (differing and not growth):
                growth = tuple(found)
    if not unlike:
        missing |= dict.fromkeys(_missing_steps(a, b))
    return TraceDiff(
        num_steps, num_points, num_equal, first, first_beyond, growth, unlike, tuple(missing)
    )


def _unlike(a: TracedStep, b: TracedStep) -> str:
    """What differs in what two steps were given; empty where nothing does."""
    for what in ("positions", "sequences", "logit_rows", "token_ids"):
        if getattr(a, what) != getattr(b, what):
            return f"step {a.step} has other {what.replace('_', ' ')}"
    return ""


def _missing_steps(a: ModelTrace, b: ModelTrace) -> Iterator[str]:
    of_a, of_b = ({step.step for step in trace.steps} for trace in (a, b))
    for step in sorted(of_a ^ of_b):
        yield f"step {step} is only in {'A' if step in of_a else 'B'}"


def _missing(a: TracedStep, b: TracedStep) -> Iterator[str]:
    for one, other, name in ((a, b, "A"), (b, a, "B")):
        for place, point in one.points.items():
            if place not in other.points:
                yield f"{point.text} is only in {name}"


def distances(a: TracedStep, b: TracedStep) -> Iterator[PointDistance]:
    """How far the points that both steps have are apart, in order."""
    for place, point in a.points.items():
        if (other := b.points.get(place)) is not None:
            yield _apart(a.step, point, other)


def _apart(step: int, a: Point, b: Point) -> PointDistance:
    def distance(relative: float, *, is_estimate: bool = False, what: str = "") -> PointDistance:
        return PointDistance(step, a.name, a.layer, relative, is_estimate, what)

    if a.shape != b.shape:
        return distance(1.0, what=f"its shape is {a.shape} in A and {b.shape} in B")
    if a.digest == b.digest and _figures(a) == _figures(b):
        return distance(0.0)
    if (a.num_nan, a.num_inf) != (b.num_nan, b.num_inf):
        counts = [f"{p.num_nan} NaN and {p.num_inf} infinities" for p in (a, b)]
        return distance(1.0, what=f"A has {counts[0]}, B {counts[1]}")
    scale = max(a.rms, b.rms) or 1.0
    is_finite = not a.num_nan + a.num_inf
    if a.values is None or b.values is None:
        off = rms_of(a.sketch.astype(np.float64) - b.sketch)
        if is_finite and not max(a.rms, b.rms):
            return replace(distance(0.0), is_of_bits=True)
        what = "" if is_finite else "not known where NaN and infinities lie: no elements were kept"
        # Where a difference hides from the sums, it is there all the same.
        return distance(max(off / scale, 1e-12), is_estimate=True, what=what)
    if np.array_equal(a.values, b.values, equal_nan=True):
        return replace(distance(0.0), is_of_bits=True)
    what = "" if _have_like_holes(a.values, b.values) else "NaN or infinities lie in other places"
    both = np.isfinite(a.values) & np.isfinite(b.values)
    off = rms_of(a.values[both].astype(np.float64) - b.values[both])
    return distance(max(off / scale, 1e-12), what=what)


def _figures(point: Point) -> tuple[float, ...]:
    """Figures that are the same for the same elements, in whatever order they are summed."""
    return point.low, point.high, point.num_nan, point.num_inf


def _have_like_holes(a: Float32s, b: Float32s) -> bool:
    """Whether NaN, and infinities of each sign, lie in the same places."""
    return all(np.array_equal(hole(a), hole(b)) for hole in (np.isnan, np.isposinf, np.isneginf))


def rms_of(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
