"""numba kernels of `route` and `group`."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import (
    add,
    div,
    exp,
    get,
    keep,
    larger,
    load,
    max_lanes,
    mul,
    pick,
    put,
    sigmoid,
    splat,
    store,
    sub,
    sum_lanes,
)

_ZERO, _ONE, _INFINITY = np.float32(0), np.float32(1), np.float32(np.inf)
_LEAST_SUM = np.float32(1e-20)
#: What is no number counts as this: below all others, and yet an expert that can be taken.
_LOWEST = np.float32(-3.0e38)


@inline
def _softmax(scores: Any, first: int, num_experts: int) -> None:
    largest = splat(-_INFINITY)
    for at in range(0, num_experts, 16):
        logits = keep(load(scores, first + at), 0, num_experts - at, -_INFINITY)
        largest = larger(logits, largest)
    highest, total = splat(max_lanes(largest)), splat(_ZERO)
    for at in range(0, num_experts, 16):
        raised = exp(sub(load(scores, first + at), highest))
        raised = keep(raised, 0, num_experts - at, _ZERO)
        store(scores, first + at, raised)
        total = add(total, raised)
    whole = splat(sum_lanes(total))
    for at in range(0, num_experts, 16):
        store(scores, first + at, div(load(scores, first + at), whole))


@inline
def _poison(scores: Any, first: int, num_experts: int) -> float:
    """0, or NaN where a logit is not finite."""
    total = splat(_ZERO)
    for at in range(0, num_experts, 16):
        logits = keep(load(scores, first + at), 0, num_experts - at, _ZERO)
        total = add(total, mul(logits, splat(_ZERO)))
    return sum_lanes(total)  # type: ignore[no-any-return]


@inline
def _key(scores: Any, first: int, bias: Any, expert: int) -> Any:
    key = get(scores, first + expert)
    if bias.shape[0] > 0:
        key = key + get(bias, expert)
    return key if key >= _LOWEST else _LOWEST


@inline
def _best_after(
    scores: Any, first: int, bias: Any, num_experts: int, last_key: float, last: int
) -> int:
    """The best expert of those behind one in the order of keys, and of numbers where these tie."""
    best, best_key = -1, -_INFINITY
    for expert in range(num_experts):
        key = _key(scores, first, bias, expert)
        is_behind = key < last_key or (key == last_key and expert > last)
        if is_behind and (best < 0 or key > best_key):
            best, best_key = expert, key
    return best


@inline
def _group_key(scores: Any, first: int, bias: Any, begin: int, end: int, kind: int) -> Any:
    """What experts begin .. end - 1 are chosen by as a group; `choice.BEST_OF_GROUP` says how."""
    best, second = _LOWEST, _LOWEST
    for expert in range(begin, end):
        key = _key(scores, first, bias, expert)
        if key > best:
            best, second = key, best
        elif key > second:
            second = key
    total = best if kind == 0 else best + second
    return total if total >= _LOWEST else _LOWEST


@inline
def _leave_out(
    scores: Any, first: int, bias: Any, num_experts: int, num_groups: int, num_used: int, kind: int
) -> None:
    """The scores of all groups but the best are such that nobody takes them."""
    size, last, last_key = num_experts // num_groups, -1, _INFINITY
    for _ in range(num_used):
        best, best_key = -1, -_INFINITY
        for group in range(num_groups):
            key = _group_key(scores, first, bias, group * size, group * size + size, kind)
            is_behind = key < last_key or (key == last_key and group > last)
            if is_behind and (best < 0 or key > best_key):
                best, best_key = group, key
        last, last_key = best, best_key
    for group in range(num_groups):
        key = _group_key(scores, first, bias, group * size, group * size + size, kind)
        if key < last_key or (key == last_key and group > last):
            for expert in range(group * size, group * size + size):
                put(scores, first + expert, -_INFINITY)


@cpu_kernel
def route(
    scores: Any, bias: Any, factors: Any, counts: Any, num_experts: int, kind: int,
    normalises: bool, has_gate: int, scale: float, num_groups: int, num_groups_used: int,
    ids: Any, weights: Any,
) -> None:  # fmt: skip
    """Formula: ids = the num_used largest of scores + bias, with scores = softmax(logits) or
    sigmoid(logits); weights = scale factors[ids] scores[ids], divided by their sum where
    `normalises`.
    Shapes: scores f32 [num_tokens, pitch], at first the logits; bias and factors f32
    [num_experts padded to 64] or empty; counts i32 [2]; ids i32 [num_tokens, num_used]; weights
    f32 [num_tokens, num_used + 1], the last one of the shared expert.
    Source: Shazeer et al., arXiv 1701.06538; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """
    num_used, pitch = ids.shape[1], scores.shape[1]
    for row in prange(get(counts, 0)):
        first, to = row * pitch, row * (num_used + 1)
        shared = _ONE
        if has_gate:
            shared = pick(sigmoid(splat(get(scores, first + num_experts))), 0)
        put(weights, to + num_used, shared)
        poison = _poison(scores, first, num_experts)
        if kind == 0:
            _softmax(scores, first, num_experts)
        else:
            for at in range(0, num_experts, 16):
                store(scores, first + at, sigmoid(load(scores, first + at)))
        if num_groups_used < num_groups:
            _leave_out(scores, first, bias, num_experts, num_groups, num_groups_used, kind)
        total, last, last_key = _ZERO, -1, _INFINITY
        for slot in range(num_used):
            last = _best_after(scores, first, bias, num_experts, last_key, last)
            last_key = _key(scores, first, bias, last)
            score = get(scores, first + last)
            put(ids, row * num_used + slot, np.int32(last))
            put(weights, to + slot, score)
            total += score
        divisor = max(total, _LEAST_SUM) if normalises else _ONE
        for slot in range(num_used):
            weight = get(weights, to + slot) / divisor * scale
            if factors.shape[0] > 0:
                weight = weight * get(factors, get(ids, row * num_used + slot))
            put(weights, to + slot, weight + poison)


@cpu_kernel
def group(
    ids: Any, counts: Any, alignment: int, experts: Any, firsts: Any, sizes: Any, sources: Any,
    places: Any, sorted_counts: Any, found: Any, ends: Any,
) -> None:  # fmt: skip
    """Formula: places[t, j] = how many choices stand before choice (t, j), sorted by expert and
    then by token; sources[places[t, j]] = t.
    Shapes: ids and places i32 [num_tokens, num_used]; counts i32 [2]; experts, firsts and sizes
    i32 [num_groups]; sources i32 [num_rows]; sorted_counts i32 [2]; found i32 [1]; ends i32
    [num_experts].
    """
    for _ in prange(1):  # the rows of an expert follow those of the experts before
        num_choices = get(counts, 0) * ids.shape[1]
        for expert in range(ends.shape[0]):
            put(ends, expert, np.int32(0))
        for choice in range(num_choices):
            expert = get(ids, choice)
            put(ends, expert, np.int32(get(ends, expert) + 1))
        row, num_found = 0, 0
        for expert in range(ends.shape[0]):
            size = get(ends, expert)
            put(ends, expert, np.int32(row))
            if size > 0:
                put(experts, num_found, np.int32(expert))
                put(firsts, num_found, np.int32(row))
                put(sizes, num_found, np.int32(size))
                row += (size + alignment - 1) // alignment * alignment
                num_found += 1
        put(found, 0, np.int32(num_found))
        put(sorted_counts, 0, np.int32(row))
        put(sorted_counts, 1, np.int32(row))
        for empty in range(num_found, experts.shape[0]):
            put(experts, empty, np.int32(0))
            put(firsts, empty, np.int32(0))
            put(sizes, empty, np.int32(0))
        for unused in range(sources.shape[0]):
            put(sources, unused, np.int32(0))  # rows between two experts are some token's, too
        for choice in range(num_choices):
            expert = get(ids, choice)
            place = get(ends, expert)
            put(ends, expert, np.int32(place + 1))
            put(places, choice, np.int32(place))
            put(sources, place, np.int32(choice // ids.shape[1]))
