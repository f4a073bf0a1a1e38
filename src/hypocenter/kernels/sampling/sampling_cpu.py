"""The compiled CPU kernel of sampling; formula and reference stand in `sampling.py`.

Every sum runs in the order that the reference has, without fast-math and fused operations: the two
choose the same token bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import allocating_kernel, inline, inline_allocating, prange
from hypocenter.kernels.sampling.exponential import (
    EXP_COEFFICIENTS,
    EXP_LOWEST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    POWERS_OF_TWO,
)

_LAST_POWER = 1022

#: Columns of `settings`, f64 [num_rows, NUM_SETTINGS].
REPEAT, PRESENCE, FREQUENCY, TEMPERATURE, TOP_K, TOP_P, MIN_P, UNIFORM = range(8)
NUM_SETTINGS = 8

#: How many tokens top_p sorts at first; eight times as many as long as they do not suffice.
_FIRST_SORTED = 256


@allocating_kernel
def _sample_cpu(
    logits: Any,
    settings: Any,
    context_ids: Any,
    output_counts: Any,
    context_starts: Any,
    bias_ids: Any,
    biases: Any,
    bias_starts: Any,
    masks: Any,
    room: Any,
    chosen: Any,
    num_bad: Any,
) -> None:
    """Formula: chosen = the first token, in rising id, whose cumulated weight exceeds UNIFORM times
    all of them, with weight = exp((value - highest) / TEMPERATURE) of what the filters keep; the
    lowest id of the highest value where TEMPERATURE = 0, and -1 where there is none.
    Shapes: logits f32 [num_rows, vocab_size]; settings f64 [num_rows, NUM_SETTINGS]; context_ids
    and output_counts i32 [num_context], rows one after the other, distinct within a row;
    context_starts i64 [num_rows + 1]; bias_ids i32 and biases f64 [num_biases], likewise;
    bias_starts i64 [num_rows + 1]; masks i32 [num_rows, num_words], a bit for each token that may
    be chosen, or no rows; room f64 [num_rows, 2, vocab_size], written: values and weights, if it
    comes to them; chosen i32 [num_rows], written; num_bad i32 [num_rows], written: how many values
    are NaN or infinity.
    Source: temperature and top_p as in Holtzman et al., arXiv 1904.09751.
    """
    for row in prange(logits.shape[0]):
        start, stop = context_starts[row], context_starts[row + 1]
        first, last = bias_starts[row], bias_starts[row + 1]
        is_free = start == stop and first == last and masks.shape[0] == 0
        best, bad = _survey(logits[row])
        num_bad[row] = bad
        if bad > 0 or logits[row, best] == -np.inf:
            chosen[row] = -1
        elif settings[row, TEMPERATURE] == 0 and is_free:
            chosen[row] = best
        else:
            values, weights = room[row, 0], room[row, 1]
            for i in range(values.shape[0]):
                values[i] = logits[row, i]
            is_any_left = masks.shape[0] == 0 or _mask(values, masks[row])
            for n in range(first, last):
                values[bias_ids[n]] += biases[n]
            ids, counts = context_ids[start:stop], output_counts[start:stop]
            _penalise(values, ids, counts, settings[row])
            chosen[row] = _choose(values, weights, settings[row]) if is_any_left else -1


@inline
def _survey(logits: Any) -> Any:
    """Lowest id of the highest logit, and how many values are NaN or +inf."""
    best, bad = 0, 0
    highest = -np.inf
    for i in range(logits.shape[0]):
        value = logits[i]
        if not value < np.inf:
            bad += 1
        elif value > highest:
            highest, best = value, i
    return best, bad


@inline
def _mask(values: Any, mask: Any) -> Any:
    """Take out what may not be chosen; whether anything is left that can be."""
    is_any_left = False
    for i in range(values.shape[0]):
        if (mask[i >> 5] >> (i & 31)) & 1 == 0:
            values[i] = -np.inf
        elif values[i] > -np.inf:
            is_any_left = True
    return is_any_left


@inline
def _penalise(values: Any, ids: Any, counts: Any, settings: Any) -> None:
    for n in range(ids.shape[0]):
        value = values[ids[n]]
        value = value * settings[REPEAT] if value <= 0 else value / settings[REPEAT]
        if counts[n] > 0:
            value -= np.float64(counts[n]) * settings[FREQUENCY] + settings[PRESENCE]
        values[ids[n]] = value


@inline_allocating
def _choose(values: Any, weights: Any, settings: Any) -> Any:
    """Steps 3 to 7 of `sampling.py`; the kept tokens are those up to (cut_value, cut_id)."""
    best, _ = _survey(values)
    if settings[TEMPERATURE] == 0:
        return best
    highest = values[best]
    cut_value, cut_id = -np.inf, values.shape[0]
    num_sorted = min(np.int64(settings[TOP_K]), values.shape[0])
    sorted_ids = np.empty(0, np.int64)
    if num_sorted > 0:
        sorted_ids = _most_likely(values, num_sorted)
        cut_id = sorted_ids[num_sorted - 1]
        cut_value = values[cut_id]
    if settings[TOP_P] < 1:
        cut_id = _top_p(values, weights, highest, settings[TOP_P], sorted_ids)
        cut_value = values[cut_id]
    return _draw(values, weights, highest, cut_value, cut_id, settings)


@inline_allocating
def _top_p(values: Any, weights: Any, highest: Any, top_p: Any, sorted_ids: Any) -> Any:
    """The last id that top_p keeps; `sorted_ids` are what top_k left, or empty for everything."""
    num_kept = sorted_ids.shape[0]
    if num_kept > 0:
        mass, cut_id = 0.0, sorted_ids[num_kept - 1]
        cut_value = values[cut_id]
        for i in range(values.shape[0]):
            if values[i] > cut_value or (values[i] == cut_value and i <= cut_id):
                mass += _exp(values[i] - highest)
    else:
        num_kept = values.shape[0]
        mass = _weigh(values, weights, highest, 1.0)
        sorted_ids = _most_likely(values, min(_FIRST_SORTED, num_kept))
    held = 0.0
    for n in range(num_kept):
        if n == sorted_ids.shape[0]:
            sorted_ids = _most_likely(values, min(8 * n, num_kept))
        held += _exp(values[sorted_ids[n]] - highest)
        if not held < top_p * mass:
            return sorted_ids[n]
    return sorted_ids[num_kept - 1]


@inline
def _weigh(values: Any, weights: Any, highest: Any, temperature: Any) -> Any:
    """Weights of all values, and their sum. In two loops: the first one's steps go side by side."""
    for i in range(values.shape[0]):
        weights[i] = _exp((values[i] - highest) / temperature)
    total = 0.0
    for i in range(values.shape[0]):
        total += weights[i]
    return total


@inline
def _draw(
    values: Any, weights: Any, highest: Any, cut_value: Any, cut_id: Any, settings: Any
) -> Any:
    """The token at which the cumulated weight first exceeds its share of the total."""
    vocab_size, min_p, temperature = values.shape[0], settings[MIN_P], settings[TEMPERATURE]
    is_cut, total = cut_id < vocab_size, 0.0
    if not is_cut:
        total = _weigh(values, weights, highest, 1.0 if min_p > 0 else temperature)
    if is_cut or min_p > 0:
        total = 0.0
        for i in range(vocab_size):
            relative = values[i] - highest
            is_kept = values[i] > cut_value or (values[i] == cut_value and i <= cut_id)
            if is_kept and min_p > 0:
                is_kept = (_exp(relative) if is_cut else weights[i]) >= min_p
            weights[i] = _exp(relative / temperature) if is_kept else 0.0
            total += weights[i]
    wanted = settings[UNIFORM] * total
    cumulated = 0.0
    last = 0
    for i in range(vocab_size):
        if weights[i] > 0:
            cumulated += weights[i]
            last = i
            if cumulated > wanted:
                break
    return last


@inline_allocating
def _most_likely(values: Any, num: Any) -> Any:
    """The ids of the `num` highest values, highest first, ties in rising id; i64 [num].

    A heap holds the best seen so far with the worst of them at its root.
    """
    heap = np.empty(num, np.int64)
    for i in range(num):
        heap[num - 1 - i] = i
    for root in range(num // 2 - 1, -1, -1):
        _sift_down(values, heap, root, num)
    for i in range(num, values.shape[0]):
        # An equal value has the higher id here, and so loses.
        if values[i] > values[heap[0]]:
            heap[0] = i
            _sift_down(values, heap, 0, num)
    for last in range(num - 1, 0, -1):
        heap[0], heap[last] = heap[last], heap[0]
        _sift_down(values, heap, 0, last)
    return heap


@inline
def _sift_down(values: Any, heap: Any, root: Any, num: Any) -> None:
    while 2 * root + 1 < num:
        child = 2 * root + 1
        if child + 1 < num and _is_worse(values, heap[child + 1], heap[child]):
            child += 1
        if not _is_worse(values, heap[child], heap[root]):
            return
        heap[root], heap[child] = heap[child], heap[root]
        root = child


@inline
def _is_worse(values: Any, a: Any, b: Any) -> Any:
    return values[a] < values[b] or (values[a] == values[b] and a > b)


@inline
def _exp(x: Any) -> Any:
    """`sampling.exp_reference` for one number."""
    # Nothing checks the index below: no x may lead outside the table, NaN and infinity included.
    if not x >= EXP_LOWEST:
        return 0.0
    x = min(x, 0.0)
    k = np.floor(x * LOG2_E + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    series = 0.0
    for coefficient in EXP_COEFFICIENTS:
        series = series * r + coefficient
    return series * POWERS_OF_TWO[np.int64(k) + _LAST_POWER]
