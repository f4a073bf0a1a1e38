"""How experts are chosen by their scores: parameters, and the rule in float64; launches nothing.

Softmax scores (Shazeer et al., arXiv 1701.06538) or sigmoid scores with a bias that decides the
choice and not the weight (DeepSeek-V3, arXiv 2412.19437). Ties go to the expert that comes first,
and to the group that does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: Kinds of scores, and what kernels call them.
SCORES = {"softmax": 0, "sigmoid": 1}
#: By how many of its best a group of experts is chosen: DeepSeek-V2 (arXiv 2405.04434, section
#: 2.2.2) takes the best one, V3 the sum of two.
BEST_OF_GROUP = {"softmax": 1, "sigmoid": 2}
#: What normalised weights are divided by is at least this.
LEAST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How experts are chosen by their scores: `scores` is a key of SCORES.

    `normalises`: the weights of those that were chosen are divided by their sum; then all are
    multiplied by `scale`. `has_gate`: behind the logits of the experts is one by whose sigmoid the
    shared expert counts; else that counts 1. Experts stand in `num_groups` groups of consecutive
    ones, and those of `num_groups_used` of them can be chosen.
    """

    num_experts: int
    num_used: int
    scores: str = "softmax"
    normalises: bool = True
    scale: float = 1.0
    has_gate: bool = False
    num_groups: int = 1
    num_groups_used: int = 1

    @property
    def group_size(self) -> int:
        return self.num_experts // self.num_groups

    @property
    def is_limited(self) -> bool:
        """Whether there are groups whose experts are left out."""
        return self.num_groups_used < self.num_groups


def reference(
    logits: np.ndarray[Any, Any],
    choice: ExpertChoice,
    bias: np.ndarray[Any, Any] | None = None,
    factors: np.ndarray[Any, Any] | None = None,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """ids [num_tokens, num_used] and weights [num_tokens, num_used + 1] in float64.

    Weights of a token with a logit that is not finite are NaN.
    """
    x = logits[:, : choice.num_experts].astype(np.float64)
    if choice.scores == "softmax":
        exponentials = np.exp(x - x.max(axis=1, keepdims=True))
        scores = exponentials / exponentials.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-x))
    keys = scores if bias is None else scores + bias[: choice.num_experts]
    if choice.is_limited:
        keys = _in_groups(keys, choice)
    ids = np.argsort(-keys, axis=1, kind="stable")[:, : choice.num_used]
    weights = np.take_along_axis(scores, ids, axis=1)
    if choice.normalises:
        weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), LEAST_SUM)
    shared = np.ones((len(x), 1))
    if choice.has_gate:
        shared = 1 / (1 + np.exp(-logits[:, choice.num_experts :][:, :1].astype(np.float64)))
    weights = weights * choice.scale
    if factors is not None:
        weights = weights * factors[ids]
    return ids, np.concatenate([weights, shared], axis=1)


def _in_groups(keys: np.ndarray[Any, Any], choice: ExpertChoice) -> np.ndarray[Any, Any]:
    """keys [num_tokens, num_experts], -inf for those of groups that are left out."""
    groups = keys.reshape(len(keys), choice.num_groups, -1)
    best = np.sort(groups, axis=2)[:, :, -BEST_OF_GROUP[choice.scores] :].sum(axis=2)
    order = np.argsort(-best, axis=1, kind="stable")
    left_out = np.ones(best.shape, bool)
    np.put_along_axis(left_out, order[:, : choice.num_groups_used], False, axis=1)
    limited: np.ndarray[Any, Any] = np.where(left_out[:, :, None], -np.inf, groups)
    return limited.reshape(keys.shape)
