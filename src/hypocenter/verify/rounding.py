"""How far rounding of activations moves a model's logits: what two devices may be apart, and at
which tokens more, since a choice of experts or a sum is nearly tied there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hypocenter.base.dtypes import Array, Float64s
from hypocenter.device import copies
from hypocenter.engine.runner import Runner
from hypocenter.verify.outcome import Uncovered

#: Activations are rounded so often in a layer: before q, k and v, after attention, and twice in the
#: feed-forward.
_ROUNDINGS_PER_LAYER = 4
#: Of a group of 32 numbers the largest is about three times their root mean square. A code is off
#: by up to half a 127th of it, its scale by an eighth more, and in the root mean square by a share
#: of 1 / sqrt(3) of that.
_OF_CODES = 3 * 1.125 / 254 / math.sqrt(3)
_OF_HALVES, _OF_BF16 = 2.0**-11, 2.0**-8
#: A rounding on either side, and as much again for what attention makes of it.
_SIDES = 2.0
#: Draws of rounding. A choice that a device may make otherwise comes out otherwise in one of them,
#: but in 4 % of the cases at worst.
_NUM_DRAWS = 4


def distance_allowed(runner: Runner) -> float:
    """How far logits of two devices may be apart, as a share of their root mean square: roundings
    of activations are independent, so their squares add."""
    return _rounding_of(runner) * math.sqrt(_ROUNDINGS_PER_LAYER * len(runner.weights.layers))


def _rounding_of(runner: Runner) -> float:
    """The share by which two devices may read an activation otherwise, in the root mean square."""
    dtypes = {dtype.name for dtype in runner.weights.dtypes}
    if any(dtype.is_quantised for dtype in runner.weights.dtypes):
        item = _OF_CODES
    else:
        item = _OF_BF16 if "BF16" in dtypes else _OF_HALVES
    return _SIDES * item


def distance(item: Array, other: Array) -> float:
    """The root mean square of the difference of two rows of logits over that of the second."""
    size = float(np.sqrt(np.mean(np.square(other - other.mean(), dtype=np.float64))))
    apart = float(np.sqrt(np.mean(np.square(item.astype(np.float64) - other))))
    return apart / size if size and math.isfinite(apart) else math.inf


def reach_of_rounding(runner: Runner, run: Callable[[], Array]) -> Float64s:
    """How far rounding alone moves each of the rows that `run` gives of `runner`: the largest
    distance in a few draws. Each draw multiplies the norms that products read, column by column, by
    numbers as far from 1 as two devices may read an activation otherwise.

    Where this is more than `distance_allowed`, another device's row tells nothing.
    """
    right = run()
    reach = np.zeros(len(right))
    for seed in range(_NUM_DRAWS):
        with _rounded_norms(runner, seed):
            found = run()
        apart = [distance(item, other) for item, other in zip(found, right, strict=True)]
        reach = np.maximum(reach, apart)
    return reach


def undecided_of(positions: Sequence[int], reach: Float64s, allowed: float) -> Uncovered | None:
    """Tokens of which another device's rows tell nothing, and why; None where there are none."""
    of = [at for at, moved in enumerate(reach) if not moved <= allowed]
    if not of:
        return None
    most = max(of, key=lambda at: float(reach[at]))
    what = f"{len(of)} of {len(positions)} tokens, the first of them {positions[of[0]]}"
    why = (
        "not decided: a choice of experts or a sum is nearly tied there, and rounding alone moves "
        f"token {positions[most]} by {reach[most]:.3g}, where {allowed:.3g} is allowed"
    )
    return Uncovered(what, why)


@contextlib.contextmanager
def _rounded_norms(runner: Runner, seed: int) -> Iterator[None]:
    """The norms of all layers, off by a rounding while this lasts."""
    drawn, share = np.random.default_rng(seed), _rounding_of(runner)
    norms = [norm for w in runner.weights.layers for norm in (w.attn_norm, w.ffn_norm)]
    held = [(norm, copies.to_host(norm)) for norm in norms if norm is not None]
    try:
        for norm, values in held:
            factors = 1 + share * drawn.standard_normal(values.shape)
            copies.to_device(norm, (values * factors).astype(np.float32))
        yield
    finally:
        for norm, values in held:
            copies.to_device(norm, values)
