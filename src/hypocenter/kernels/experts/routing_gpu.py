"""Triton kernels of `route` and `group`: a program for a token, for an expert, or for all of few.

What `group` finds is a matter of counting; which kernel counts changes nothing.
"""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.experts.choice import LEAST_SUM, SCORES
from hypocenter.kernels.experts.experts_table import ExpertsShape
from hypocenter.kernels.shared_gpu import follow

_LEAST_SUM = tl.constexpr(LEAST_SUM)
#: What is no number counts as this: below all others, and yet an expert that can be taken.
_LOWEST = tl.constexpr(-3.0e38)
#: Behind every expert: the id of a choice that no live token has made.
_NOBODY = tl.constexpr(1 << 30)
#: Choices that one program sorts by itself, and those that one looks at in turn.
_MOST_SORTED, _BLOCK = 64, 256
#: Experts up to which a program has one warp, which finds the best without waiting for others.
_MOST_OF_A_WARP = 128


@triton.jit
def _scores_of(logits, inside, IS_SIGMOID: tl.constexpr):
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(inside, logits, -float("inf"))
        raised = tl.where(inside, tl.exp(logits - tl.max(logits, axis=0)), 0.0)
        scores = raised / tl.sum(raised, axis=0)
    return scores


@triton.jit
def _in_groups(
    keys,
    expert,
    inside,
    TAKES_TWO: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_USED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys of the groups that can be chosen from; those of the others are the lowest that are."""
    group = expert // GROUP_SIZE
    of_group = tl.full([BLOCK], -float("inf"), tl.float32)
    for index in range(NUM_GROUPS):
        own = inside & (group == index)
        best = tl.max(tl.where(own, keys, -float("inf")), axis=0)
        if TAKES_TWO:
            first = tl.min(tl.where(own & (keys == best), expert, BLOCK), axis=0)
            rest = tl.where(own & (expert != first), keys, -float("inf"))
            best += tl.max(rest, axis=0)
        of_group = tl.where(own, tl.maximum(best, _LOWEST), of_group)
    can = expert < 0
    for _ in range(GROUPS_USED):
        taken = tl.min(tl.where(of_group == tl.max(of_group, axis=0), expert, BLOCK), axis=0)
        is_same = group == taken // GROUP_SIZE
        can = can | is_same
        of_group = tl.where(is_same, -float("inf"), of_group)
    return tl.where(can, keys, _LOWEST)


@triton.jit
def route_kernel(
    scores_ptr, bias_ptr, factors_ptr, counts_ptr, ids_ptr, weights_ptr, num_experts, pitch, scale,
    IS_SIGMOID: tl.constexpr, NORMALISES: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FACTORS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUPS_USED: tl.constexpr, OVERLAPS: tl.constexpr,
    NUM_USED: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: ids = the num_used largest of scores + bias, with scores = softmax(logits) or
    sigmoid(logits); weights = scale factors[ids] scores[ids], divided by their sum where
    NORMALISES.
    Shapes: scores f32 [num_tokens, pitch], at first the logits; bias and factors f32
    [num_experts]; counts i32 [2]; ids i32 [num_tokens, num_used]; weights f32 [num_tokens,
    num_used + 1], the last one of the shared expert.
    Source: Shazeer et al., arXiv 1701.06538; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = expert < num_experts
    own = scores_ptr + row * pitch
    logits = tl.load(own + expert, mask=inside, other=0.0)
    # 0, or NaN where a logit is not finite.
    poison = tl.sum(logits * 0.0, axis=0)
    scores = _scores_of(logits, inside, IS_SIGMOID)
    shared = 1.0
    if HAS_GATE:
        shared = 1.0 / (1.0 + tl.exp(-tl.load(own + num_experts)))
    keys = scores
    if HAS_BIAS:
        keys += tl.load(bias_ptr + expert, mask=inside, other=0.0)
    keys = tl.where(inside, tl.where(keys >= _LOWEST, keys, _LOWEST), -float("inf"))
    if GROUPS_USED < NUM_GROUPS:
        keys = _in_groups(
            keys, expert, inside, IS_SIGMOID, GROUP_SIZE, NUM_GROUPS, GROUPS_USED, BLOCK
        )
    tl.store(own + expert, scores, mask=inside)
    weights = tl.zeros([SLOTS], tl.float32)
    factors = tl.full([SLOTS], 1.0, tl.float32)
    total = 0.0
    for j in range(NUM_USED):
        best = tl.max(keys, axis=0)
        taken = tl.min(tl.where(keys == best, expert, BLOCK), axis=0)
        score = tl.sum(tl.where(expert == taken, scores, 0.0), axis=0)
        tl.store(ids_ptr + row * NUM_USED + j, taken)
        weights = tl.where(slot == j, score, weights)
        if HAS_FACTORS:
            factors = tl.where(slot == j, tl.load(factors_ptr + taken), factors)
        total += score
        keys = tl.where(expert == taken, -float("inf"), keys)
    if NORMALISES:
        weights = weights / tl.maximum(total, _LEAST_SUM)
    weights = weights * scale
    if HAS_FACTORS:
        weights = weights * factors
    weights = tl.where(slot == NUM_USED, shared, weights + poison)
    tl.store(weights_ptr + row * (NUM_USED + 1) + slot, weights, mask=slot <= NUM_USED)


@triton.jit
def group_few_kernel(
    ids_ptr, counts_ptr, experts_ptr, firsts_ptr, sizes_ptr, sources_ptr, places_ptr,
    sorted_counts_ptr, found_ptr, num_used, num_groups, num_rows, OVERLAPS: tl.constexpr,
    GROUP_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: places[t, j] = how many choices stand before choice (t, j), sorted by expert and
    then by token; sources[places[t, j]] = t.
    Shapes: ids and places i32 [num_tokens, num_used]; counts i32 [2]; experts, firsts and
    sizes i32 [num_groups]; sources i32 [num_rows]; sorted_counts i32 [2]; found i32 [1].

    One program holds each choice against each other one.
    """
    follow(OVERLAPS)
    choice = tl.arange(0, BLOCK)
    num_choices = tl.load(counts_ptr) * num_used
    live = choice < num_choices
    expert = tl.load(ids_ptr + choice, mask=live, other=_NOBODY)
    is_same = expert[None, :] == expert[:, None]
    is_earlier = is_same & (choice[None, :] < choice[:, None])
    is_before = is_earlier | (expert[None, :] < expert[:, None])
    place = tl.sum(is_before.to(tl.int32), axis=1)
    rank = tl.sum(is_earlier.to(tl.int32), axis=1)
    size = tl.sum(is_same.to(tl.int32), axis=1)
    begins = live & (rank % GROUP_ROWS == 0)
    begins_before = is_before & (begins.to(tl.int32)[None, :] != 0)
    group = tl.sum(begins_before.to(tl.int32), axis=1)
    num_found = tl.sum(begins.to(tl.int32), axis=0)
    tl.store(experts_ptr + group, expert, mask=begins)
    tl.store(firsts_ptr + group, place, mask=begins)
    tl.store(sizes_ptr + group, tl.minimum(size - rank, GROUP_ROWS), mask=begins)
    empty = (choice >= num_found) & (choice < num_groups)
    tl.store(experts_ptr + choice, 0, mask=empty)
    tl.store(firsts_ptr + choice, 0, mask=empty)
    tl.store(sizes_ptr + choice, 0, mask=empty)
    tl.store(places_ptr + choice, place, mask=live)
    tl.store(sources_ptr + place, choice // num_used, mask=live)
    tl.store(sources_ptr + choice, 0, mask=(choice >= num_choices) & (choice < num_rows))
    both = tl.arange(0, 2)
    tl.store(sorted_counts_ptr + both, num_choices + both * 0)
    tl.store(found_ptr, num_found)


@triton.jit
def group_kernel(
    ids_ptr, counts_ptr, experts_ptr, firsts_ptr, sizes_ptr, sources_ptr, places_ptr,
    sorted_counts_ptr, found_ptr, num_used, num_groups, num_rows, num_experts,
    OVERLAPS: tl.constexpr, GROUP_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: places[t, j] = how many choices stand before choice (t, j), sorted by expert and
    then by token; sources[places[t, j]] = t.
    Shapes: ids and places i32 [num_tokens, num_used]; counts i32 [2]; experts, firsts and
    sizes i32 [num_groups]; sources i32 [num_rows]; sorted_counts i32 [2]; found i32 [1].

    A program for each expert, which has some of the groups to itself, empty ones among them:
    rows first .. end touch at most end / GROUP_ROWS - first / GROUP_ROWS + 1 groups.
    """
    follow(OVERLAPS)
    expert, step = tl.program_id(0), tl.arange(0, BLOCK)
    num_choices = tl.load(counts_ptr) * num_used
    first, size = 0, 0
    for start in range(0, num_choices, BLOCK):
        choice = start + step
        taken = tl.load(ids_ptr + choice, mask=choice < num_choices, other=_NOBODY)
        first += tl.sum((taken < expert).to(tl.int32), axis=0)
        size += tl.sum((taken == expert).to(tl.int32), axis=0)
    place = first
    for start in range(0, num_choices, BLOCK):
        choice = start + step
        taken = tl.load(ids_ptr + choice, mask=choice < num_choices, other=_NOBODY)
        is_own = taken == expert
        to = place + tl.cumsum(is_own.to(tl.int32), axis=0) - 1
        tl.store(places_ptr + choice, to, mask=is_own)
        tl.store(sources_ptr + to, choice // num_used, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), axis=0)
    is_last = expert == num_experts - 1
    begin = first // GROUP_ROWS + expert
    end = (first + size) // GROUP_ROWS + expert + 1
    if is_last:
        both = tl.arange(0, 2)
        tl.store(sorted_counts_ptr + both, num_choices + both * 0)
        tl.store(found_ptr, end)
        end = num_groups
        for start in range(num_choices, num_rows, BLOCK):
            tl.store(sources_ptr + start + step, 0, mask=start + step < num_rows)
    for start in range(begin, end, BLOCK):
        group = start + step
        done = (group - begin) * GROUP_ROWS
        is_full = (group < end) & (done < size)
        tl.store(experts_ptr + group, tl.where(is_full, expert, 0), mask=group < end)
        tl.store(firsts_ptr + group, tl.where(is_full, first + done, 0), mask=group < end)
        left = tl.minimum(size - done, GROUP_ROWS)
        tl.store(sizes_ptr + group, tl.where(is_full, left, 0), mask=group < end)


def launch_route(
    plan: BoundPlan,
    scores: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    factors: Tensor | None,
    num_experts: int,
    num_groups: int,
    num_groups_used: int,
    has_gate: int,
    kind: int,
) -> None:
    """Append route: one program for each token of the bucket."""
    num_tokens, num_used = ids.shape
    is_limited = num_groups_used < num_groups
    plan.add_gpu(
        route_kernel,
        grid=(num_tokens,),
        # A kernel without one of these never reads the pointer; Triton wants one all the same.
        bias_ptr=bias or scores,
        factors_ptr=factors or scores,
        pitch=scores.shape[1],
        num_warps=1 if num_experts <= _MOST_OF_A_WARP else 4,
        IS_SIGMOID=kind == SCORES["sigmoid"],
        HAS_GATE=has_gate == 1,
        # Without groups that are left out the sizes would make forms of what is the same.
        GROUP_SIZE=num_experts // num_groups if is_limited else 1,
        NUM_GROUPS=num_groups if is_limited else 1,
        GROUPS_USED=num_groups_used if is_limited else 1,
        NUM_USED=num_used,
        SLOTS=triton.next_power_of_2(num_used + 1),
        BLOCK=triton.next_power_of_2(num_experts),
    )


def launch_group(plan: BoundPlan, shape: ExpertsShape) -> None:
    """Append group: one program where choices are few, else one for each expert."""
    sizes = {
        "num_used": shape.num_used,
        "num_groups": shape.num_groups,
        "num_rows": shape.num_rows,
        "GROUP_ROWS": shape.group_rows,
    }
    num_sorted = max(shape.num_choices, shape.num_groups)
    if num_sorted <= _MOST_SORTED:
        num_warps, block = 1 if num_sorted <= 16 else 8, triton.next_power_of_2(num_sorted)
        plan.add_gpu(group_few_kernel, grid=(1,), num_warps=num_warps, BLOCK=block, **sizes)
        return
    plan.add_gpu(group_kernel, grid=(shape.num_experts,), BLOCK=_BLOCK, **sizes)
