"""Groups of experts whose scores tie: the lower number first, and what transformers would allow.

transformers leaves open which of several equal groups it takes. Where nothing ties it must take
ours, and where groups tie those that it takes must score what ours do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ops import kernel_launch
from ops.kernel_forms import use_form
from ops.kernel_launch import counts, launch, rows_tensor, vector_tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from hypocenter.device.copies import to_host
from hypocenter.kernels.experts import choice as choices
from hypocenter.kernels.experts.choice import ExpertChoice
from hypocenter.kernels.experts.experts_table import ExpertsShape, ExpertsTable
from hypocenter.kernels.experts.routing import route

Array = np.ndarray[Any, Any]
NUM_TOKENS, NUM_GROUPS, NUM_TAKEN = 64, 4, 2
#: Sums of two of their scores are equal only where both are; each is held exactly in f32.
LOGITS = np.array([0.0, 1.0, 2.5], np.float32)
ROUTERS = {
    "deepseek2, softmax": DeepseekV2TopkRouter,
    "deepseek2, sigmoid": DeepseekV3TopkRouter,
    "glm4moe, sigmoid": Glm4MoeTopkRouter,
}


@pytest.fixture(params=["one thread", "sim:h200"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    return use_form(request.param, monkeypatch)


def _ours(logits: Array, chosen: ExpertChoice, bias: Array | None) -> Array:
    shape = ExpertsShape(NUM_TOKENS, chosen.num_experts, chosen.num_used, kernel_launch.device)
    table = ExpertsTable.allocate(shape).first(NUM_TOKENS)
    given = rows_tensor("logits", logits)
    of_choice = None if bias is None else vector_tensor("bias", bias)
    launch(lambda p: route(p, given, chosen, table, counts(NUM_TOKENS), bias=of_choice), NUM_TOKENS)
    return to_host(table.ids)


def _theirs(name: str, logits: Array, chosen: ExpertChoice, bias: Array | None) -> Array:
    """What transformers' router takes of these logits, each row in the order of numbers."""
    size = chosen.num_experts
    config = SimpleNamespace(
        num_experts=size, num_local_experts=size, n_routed_experts=size, hidden_size=size,
        num_experts_per_tok=chosen.num_used, routed_scaling_factor=1.0, norm_topk_prob=True,
        n_group=chosen.num_groups, topk_group=chosen.num_groups_used,
        topk_method="group_limited_greedy",
    )  # fmt: skip
    router: Any = ROUTERS[name](config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(size))
        if bias is not None:
            router.e_score_correction_bias.copy_(torch.from_numpy(bias))
        taken = router(torch.from_numpy(logits))[2]
    return np.sort(taken.numpy(), axis=1)


def _scores_of_groups(name: str, logits: Array, bias: Array | None) -> Array:
    """float64 [num_tokens, NUM_GROUPS]: what groups are chosen by."""
    x = logits.astype(np.float64)
    is_softmax = name.endswith("softmax")
    keys = np.exp(x) if is_softmax else 1 / (1 + np.exp(-x)) + (0 if bias is None else bias)
    best = np.sort(keys.reshape(len(x), NUM_GROUPS, -1), axis=2)[:, :, -1 if is_softmax else -2 :]
    found: Array = best.sum(axis=2).round(9)
    return found


@pytest.mark.parametrize(
    ("name", "has_bias"),
    [
        (name, has_bias)
        for name in ROUTERS
        for has_bias in (False, True)
        if not (has_bias and name.endswith("softmax"))  # its router has none
    ],
)
def test_tied_groups_are_taken_in_order_and_score_what_transformers_takes(
    name: str, *, has_bias: bool
) -> None:
    """All experts of the groups that are taken are, so these show."""
    num_experts, rng = 12, np.random.default_rng(len(name))
    size = num_experts // NUM_GROUPS
    chosen = ExpertChoice(
        num_experts, NUM_TAKEN * size, name.split(", ")[1],
        num_groups=NUM_GROUPS, num_groups_used=NUM_TAKEN,
    )  # fmt: skip
    logits = rng.choice(LOGITS, (NUM_TOKENS, num_experts))
    # The same in each group, so that groups still tie.
    bias = np.tile(np.array([-0.25, 0.0, 0.5], np.float32), NUM_GROUPS) if has_bias else None
    ids = _ours(logits, chosen, bias)
    np.testing.assert_array_equal(ids, choices.reference(logits, chosen, bias)[0])

    scores = _scores_of_groups(name, logits, bias)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :NUM_TAKEN]
    ours, theirs = (
        np.sort(x, axis=1)[:, ::size] // size for x in (ids, _theirs(name, logits, chosen, bias))
    )
    np.testing.assert_array_equal(ours, np.sort(order, axis=1))
    ranked = -np.sort(-scores, axis=1)
    ties = ranked[:, NUM_TAKEN - 1] == ranked[:, NUM_TAKEN]
    assert 5 < ties.sum() < NUM_TOKENS - 5, "some rows tie and some do not"
    np.testing.assert_array_equal(ours[~ties], theirs[~ties])
    of_ours, of_theirs = (
        np.sort(np.take_along_axis(scores, groups, axis=1), axis=1) for groups in (ours, theirs)
    )
    np.testing.assert_array_equal(of_ours, of_theirs)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("groups", "taken"),
    [((1, 2, 2, 2), [2, 3, 4, 5]), ((2, 1, 2, 2), [0, 1, 4, 5]), ((1, 3, 0, 1), [0, 1, 2, 3])],
)
def test_a_better_group_leaves_one_place_for_those_that_tie(
    groups: tuple[int, ...], taken: list[int], scores: str
) -> None:
    chosen = ExpertChoice(8, 4, scores, num_groups=NUM_GROUPS, num_groups_used=NUM_TAKEN)
    logits = np.repeat(np.array([groups], np.float32), 2, axis=1)
    found = _ours(np.repeat(logits, NUM_TOKENS, axis=0), chosen, None)
    assert np.sort(found, axis=1).tolist() == [taken] * NUM_TOKENS
