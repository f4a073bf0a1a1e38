"""route: which experts each token takes, and what each counts; `choice.py` says by which rule."""

from __future__ import annotations

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Rule, Scalar, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.experts.choice import SCORES, ExpertChoice
from hypocenter.kernels.experts.experts_table import ExpertsTable

ROUTE = Contract(
    "route",
    # Scores take the place of the router's logits; what is behind those of experts stays.
    Arg("scores", (DType.F32,), "num_tokens, pitch", "both", fills="num_experts"),
    Arg("ids", (DType.I32,), "num_tokens, num_used", "write"),
    Arg("weights", (DType.F32,), "num_tokens, num_used + 1", "write"),
    Arg("bias", (DType.F32,), ">= -(-num_experts // 64) * 64", optional=True),
    Arg("factors", (DType.F32,), ">= -(-num_experts // 64) * 64", optional=True),
    live_counts("num_tokens", 0),
    Scalar("num_experts", "num_experts > 0", "must be above 0"),
    Scalar("scale"),
    Rule("num_used <= num_experts", "a token cannot take more experts than there are"),
    Rule(
        "num_experts + has_gate <= pitch and pitch % 16 == 0",
        "rows of scores must hold one for each expert, and be padded to whole vectors",
    ),
    Rule("num_tokens * pitch < 2**31", "scores must be within 32-bit offsets"),
    Scalar("has_gate", "has_gate in (0, 1)", "must be 0 or 1"),
    Scalar("num_groups", "num_groups > 0", "must be above 0"),
    Scalar("num_groups_used", "0 < num_groups_used <= num_groups", "must be 1 to num_groups"),
    Rule("num_experts % num_groups == 0", "groups must share experts evenly"),
    Rule(
        "num_used <= num_groups_used * (num_experts // num_groups)",
        "a token cannot take more experts than its groups have",
    ),
)
_ROUTE = Op(
    ROUTE,
    cpu="experts.routing_cpu.route",
    gpu="experts.routing_gpu.launch_route",
    work_per_row=lambda num_experts, ids: 4 * num_experts * ids.shape[1],
)


def route(
    plan: PlanBuilder,
    scores: Tensor,
    choice: ExpertChoice,
    table: ExpertsTable,
    counts: Tensor,
    *,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> None:
    """Append the experts of each token, `table.ids` and `table.weights`.

    `scores` f32 [num_tokens, >= num_experts (+ 1)] holds the router's logits and is overwritten;
    `bias` f32 [num_experts padded to 64] is added to the scores for the choice alone, and
    `factors`, of the same shape, multiply the weights in the end. A token with a logit that is not
    finite gets experts that exist and weights that are NaN.
    """
    plan.add(
        _ROUTE,
        scores=scores,
        ids=table.ids,
        weights=table.weights,
        bias=bias,
        factors=factors,
        counts=counts,
        num_experts=choice.num_experts,
        scale=choice.scale,
        has_gate=int(choice.has_gate),
        num_groups=choice.num_groups,
        num_groups_used=choice.num_groups_used,
        kind=SCORES[choice.scores],
        normalises=choice.normalises,
    )
