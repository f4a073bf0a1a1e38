"""What a mixture of experts must come to: who is chosen and how much each counts, and the sum of
what the chosen ones made. Their products are in `expert_products.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.kernels.experts import choice, mixing
from hypocenter.verify.bounds import EPS, of_chain
from hypocenter.verify.expected import Expected, OpInputs

#: Kinds of scores by the numbers that kernels have for them.
_KINDS = {number: word for word, number in choice.SCORES.items()}
#: Roundings of an exponential whose exponent is -100 or more, and of what is made of it.
_OF_SCORE = 128


def mixed_rows(given: OpInputs) -> list[Expected]:
    """`mix`: x plus the weighed rows of the experts, and the shared one's."""
    width, rows, values = given.number("width"), given.rows, given.values
    before = values["x"][rows, :width].astype(np.float64)
    if not given.number("accumulate"):
        before = np.zeros_like(before)
    of_experts = values["expert_rows"][:, :width].astype(np.float64)
    places, weights = values["places"][rows], values["weights"][rows].astype(np.float64)
    shared = None
    if given.unit.arguments["shared"] is not None:
        shared = values["shared"][rows, :width].astype(np.float64)
    exact = mixing.reference(before, of_experts, places, weights, shared)
    sizes = mixing.reference(
        np.abs(before),
        np.abs(of_experts),
        places,
        np.abs(weights),
        None if shared is None else np.abs(shared),
    )
    return [Expected("x", exact, of_chain(places.shape[1] + 2) * sizes, rows)]


def chosen_experts(given: OpInputs) -> list[Expected]:
    """`route`: the experts of each token whose scores leave no doubt, and their weights."""
    values, number = given.values, given.number
    asked = choice.ExpertChoice(
        num_experts=number("num_experts"),
        num_used=values["ids"].shape[1],
        scores=_KINDS[number("kind")],
        normalises=bool(number("normalises")),
        scale=float(number("scale")),
        has_gate=bool(number("has_gate")),
        num_groups=number("num_groups"),
        num_groups_used=number("num_groups_used"),
    )
    extra = [
        None if given.unit.arguments[name] is None else values[name].astype(np.float64)
        for name in ("bias", "factors")
    ]
    share = 2 * (_OF_SCORE + asked.num_experts) * EPS
    logits = values["scores"].astype(np.float64)
    # A choice is beyond doubt where scores that are off by their bound lead to the same one.
    nudges = np.random.default_rng(0).uniform(-1, 1, (_NUM_NUDGES, *logits.shape)) * 2 * share
    with np.errstate(over="ignore"):  # a sigmoid far below zero is zero
        ids, weights = choice.reference(logits[given.rows], asked, *extra)
        is_sure = _gaps(logits[given.rows], asked, extra[0]) > 4 * share
        for nudge in nudges:
            other, _ = choice.reference((logits + nudge)[given.rows], asked, *extra)
            is_sure &= (other == ids).all(axis=1)
    if not is_sure.any():
        return []
    rows, weights = given.rows[is_sure], weights[is_sure]
    bound = share * np.abs(weights) + 2.0**-100
    return [
        Expected("weights", weights, bound, rows),
        Expected("ids", ids[is_sure].astype(np.float64), np.full((len(rows), 1), 0.25), rows),
    ]


#: How often all scores are moved by their bound, to see whether the choice stays.
_NUM_NUDGES = 8


def _gaps(logits: Array, asked: choice.ExpertChoice, bias: Array | None) -> Array:
    """The least distance, for each token, between a chosen expert's key and the next one's."""
    x = logits[:, : asked.num_experts]
    if asked.scores == "softmax":
        scores = np.exp(x - x.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-x))
    keys = np.sort(scores if bias is None else scores + bias[: asked.num_experts], axis=1)[:, ::-1]
    steps = -np.diff(keys, axis=1)[:, : asked.num_used] / np.abs(keys[:, :1])
    found: Array = steps.min(axis=1, initial=np.inf)
    return found


REFERENCES: dict[str, Callable[[OpInputs], list[Expected]]] = {
    "mix": mixed_rows,
    "route": chosen_experts,
}
