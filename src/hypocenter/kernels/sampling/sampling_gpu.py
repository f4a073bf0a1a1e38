"""Triton kernels of sampling; formula, reference and order of the filters stand in `sampling.py`.

Nothing is sorted. Each logit becomes a 64-bit key of the same order, and a cutoff is found four
bits of the key at a time, then four bits of the id at a time: each level counts, or weighs, the
members of 16 bins. All weights are float64 with the reference's own exp and no fused operations;
only the order of the sums differs. Numbers in float64 travel as the bits of 64-bit integers.

Which kernels run in which order stands in `sampling_launches_gpu.py`.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.sampling.exponential import (
    EXP_COEFFICIENTS,
    EXP_LOWEST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
)
from hypocenter.kernels.shared_gpu import as_offset, follow

_LOWEST = tl.constexpr(EXP_LOWEST)
_LOG2_E = tl.constexpr(LOG2_E)
_LN2_HIGH = tl.constexpr(LN2_HIGH)
_LN2_LOW = tl.constexpr(LN2_LOW)
_C13, _C12, _C11, _C10, _C9, _C8, _C7, _C6, _C5, _C4, _C3, _C2, _C1, _C0 = (
    tl.constexpr(coefficient) for coefficient in EXP_COEFFICIENTS
)

#: A token's rank among equals falls from vocab_size - 1 to 0: the lowest id comes first.
#: Columns of `states` i64 [num_rows, NUM_STATES]: the highest key; the last key and rank that the
#: filters so far keep; those that the search has found so far; how many tokens it still wants;
#: what the tokens before its bin weigh; the weight it looks for; how many logits are bad.
HIGHEST = tl.constexpr(0)
CUT_KEY = tl.constexpr(1)
CUT_RANK = tl.constexpr(2)
KEY = tl.constexpr(3)
RANK = tl.constexpr(4)
COUNT = tl.constexpr(5)
HELD = tl.constexpr(6)
WANTED = tl.constexpr(7)
BAD = tl.constexpr(8)
NUM_STATES = tl.constexpr(9)
#: Columns of `settings` i64 [num_rows, NUM_SETTINGS], as `sampling_cpu.py` has them.
_NUM_SETTINGS = tl.constexpr(8)
_REPEAT = tl.constexpr(0)
_PRESENCE = tl.constexpr(1)
_FREQUENCY = tl.constexpr(2)
_TEMPERATURE = tl.constexpr(3)
_TOP_K = tl.constexpr(4)
_TOP_P = tl.constexpr(5)
_MIN_P = tl.constexpr(6)
_UNIFORM = tl.constexpr(7)
_MINUS_INFINITY_KEY = tl.constexpr(-0x7FF0000000000001)
_FLIP = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NO_KEY = tl.constexpr(-0x8000000000000000)


@triton.jit
def _as_key(value):
    """f64 to i64 of the same order; both zeros are one key."""
    bits = tl.where(value == 0, tl.abs(value), value).to(tl.int64, bitcast=True)
    return tl.where(bits < 0, bits ^ _FLIP, bits)


@triton.jit
def _as_value(key):
    return tl.where(key < 0, key ^ _FLIP, key).to(tl.float64, bitcast=True)


@triton.jit
def _load_f64(pointer):
    return tl.load(pointer).to(tl.float64, bitcast=True)


@triton.jit
def _exp(x):
    """`sampling.exp_reference`, bit for bit."""
    is_weight = x >= _LOWEST
    x = tl.where(is_weight & (x < 0), x, 0.0)
    k = tl.floor(x * _LOG2_E + 0.5)
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = r * _C13 + _C12
    series = series * r + _C11
    series = series * r + _C10
    series = series * r + _C9
    series = series * r + _C8
    series = series * r + _C7
    series = series * r + _C6
    series = series * r + _C5
    series = series * r + _C4
    series = series * r + _C3
    series = series * r + _C2
    series = series * r + _C1
    series = series * r + _C0
    power = ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(is_weight, series * power, 0.0)


@triton.jit
def _store_choice(outcomes_ptr, next_ids_ptr, row, chosen, num_bad):
    """Stores it for the host, and for a next step that begins before the host has seen it."""
    tl.store(outcomes_ptr + row * 2, chosen)
    tl.store(outcomes_ptr + row * 2 + 1, num_bad)
    tl.store(next_ids_ptr + row, tl.maximum(chosen, 0))


@triton.jit
def _where_allowed(value, masks_ptr, row, token, live, vocab_size, WIDE: tl.constexpr):
    """-inf for the tokens whose bit in the row's mask is not set."""
    num_words = (vocab_size + 31) // 32
    word = tl.load(masks_ptr + as_offset(row, WIDE) * num_words + token // 32, mask=live, other=0)
    return tl.where(((word >> (token % 32)) & 1) != 0, value, -float("inf"))


@triton.jit
def _store_best(part, value, token, live, num_bad):
    """What the choice of the highest needs to know of a block."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    # One number has the order of both: the highest logit, then the lowest id.
    both = tl.where(live, (key << 32) + (0x7FFFFFFF - token), _NO_KEY)
    tl.store(part, tl.max(both, axis=0))
    tl.store(part + 1, num_bad.to(tl.int64))


@triton.jit
def greedy_blocks_kernel(
    logits_ptr,
    parts_ptr,
    vocab_size,
    num_blocks,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: parts[row, block] = (the largest logit of the block with its lowest id, as one
    number; how many are NaN or infinity).
    Shapes: logits f32 [num_rows, vocab_size]; parts i64 [num_rows, num_blocks, 2].
    """
    follow(OVERLAPS)
    block, row = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab_size
    value = tl.load(
        logits_ptr + as_offset(row, WIDE) * vocab_size + token, mask=live, other=-float("inf")
    )
    num_bad = tl.sum((live & ~(value < float("inf"))).to(tl.int32), axis=0)
    _store_best(parts_ptr + (row * num_blocks + block) * 2, value, token, live, num_bad)


@triton.jit
def greedy_masked_blocks_kernel(
    logits_ptr,
    masks_ptr,
    parts_ptr,
    vocab_size,
    num_blocks,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: as greedy_blocks, where logits = -inf for the tokens that the mask leaves out.
    Shapes: logits f32 [num_rows, vocab_size]; masks i32 [num_rows, vocab_size / 32], a bit for
    each token; parts i64 [num_rows, num_blocks, 2].
    """
    follow(OVERLAPS)
    block, row = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab_size
    value = tl.load(
        logits_ptr + as_offset(row, WIDE) * vocab_size + token, mask=live, other=-float("inf")
    )
    num_bad = tl.sum((live & ~(value < float("inf"))).to(tl.int32), axis=0)
    value = _where_allowed(value, masks_ptr, row, token, live, vocab_size, WIDE)
    _store_best(parts_ptr + (row * num_blocks + block) * 2, value, token, live, num_bad)


@triton.jit
def greedy_rows_kernel(
    parts_ptr,
    outcomes_ptr,
    next_ids_ptr,
    num_blocks,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: next_ids[row] = the id of the largest of the row's parts; outcomes[row] = (that id
    or -1, how many logits are bad).
    Shapes: parts i64 [num_rows, num_blocks, 2]; outcomes i32 [num_rows, 2]; next_ids i32
    [num_rows].
    """
    follow(OVERLAPS)
    row, block = tl.program_id(0), tl.arange(0, BLOCK)
    live = block < num_blocks
    part = parts_ptr + (row * num_blocks + block) * 2
    best = tl.max(tl.load(part, mask=live, other=_NO_KEY), axis=0)
    num_bad = tl.sum(tl.load(part + 1, mask=live, other=0), axis=0)
    minus_infinity = (best >> 32) == -0x7F800001
    none = (num_bad > 0) | minus_infinity
    chosen = tl.where(none, -1, 0x7FFFFFFF - (best & 0xFFFFFFFF))
    _store_choice(outcomes_ptr, next_ids_ptr, row, chosen.to(tl.int32), num_bad.to(tl.int32))


@triton.jit
def sample_keys_kernel(
    logits_ptr,
    keys_ptr,
    parts_ptr,
    vocab_size,
    num_blocks,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: keys = the bits of float64(logits), changed so that integers have the order of the
    numbers; parts[.., 1] = how many logits are bad.
    Shapes: logits f32 [num_rows, vocab_size]; keys i64 [num_rows, vocab_size]; parts i64
    [num_rows, num_blocks, 2].
    """
    block, row = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab_size
    at = as_offset(row, WIDE) * vocab_size + token
    value = tl.load(logits_ptr + at, mask=live, other=0.0)
    num_bad = tl.sum((live & ~(value < float("inf"))).to(tl.int32), axis=0)
    tl.store(keys_ptr + at, _as_key(value.to(tl.float64)), mask=live)
    tl.store(parts_ptr + (row * num_blocks + block) * 2 + 1, num_bad.to(tl.int64))


@triton.jit
def sample_masked_keys_kernel(
    logits_ptr,
    masks_ptr,
    keys_ptr,
    parts_ptr,
    vocab_size,
    num_blocks,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: as sample_keys, where logits = -inf for the tokens that the mask leaves out.
    Shapes: logits f32 [num_rows, vocab_size]; masks i32 [num_rows, vocab_size / 32], a bit for
    each token; keys i64 [num_rows, vocab_size]; parts i64 [num_rows, num_blocks, 2].
    """
    block, row = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab_size
    at = as_offset(row, WIDE) * vocab_size + token
    value = tl.load(logits_ptr + at, mask=live, other=0.0)
    num_bad = tl.sum((live & ~(value < float("inf"))).to(tl.int32), axis=0)
    value = _where_allowed(value, masks_ptr, row, token, live, vocab_size, WIDE)
    tl.store(keys_ptr + at, _as_key(value.to(tl.float64)), mask=live)
    tl.store(parts_ptr + (row * num_blocks + block) * 2 + 1, num_bad.to(tl.int64))


@triton.jit
def sample_bias_kernel(
    keys_ptr,
    bias_ids_ptr,
    biases_ptr,
    bias_starts_ptr,
    vocab_size,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: l = l + b for each token of a row that has a bias b, where keys hold l.
    Shapes: keys i64 [num_rows, vocab_size]; bias_ids i32 [num_biases]; biases i64
    [num_biases], bits of float64; bias_starts i32 [num_rows + 1].
    Source: llama.cpp, llama_sampler_logit_bias_apply.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    entry = tl.load(bias_starts_ptr + row) + block * BLOCK + tl.arange(0, BLOCK)
    live = entry < tl.load(bias_starts_ptr + row + 1)
    token = tl.load(bias_ids_ptr + entry, mask=live, other=0)
    bias = tl.load(biases_ptr + entry, mask=live, other=0).to(tl.float64, bitcast=True)
    at = keys_ptr + as_offset(row, WIDE) * vocab_size + token
    value = _as_value(tl.load(at, mask=live, other=0)) + bias
    tl.store(at, _as_key(value), mask=live)


@triton.jit
def sample_penalise_kernel(
    keys_ptr,
    settings_ptr,
    context_ids_ptr,
    output_counts_ptr,
    context_starts_ptr,
    vocab_size,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: l = l repeat where l <= 0, else l / repeat; then l = l - (count frequency +
    presence) where count > 0, for each token of the context.
    Shapes: keys i64 [num_rows, vocab_size]; settings i64 [num_rows, 8], bits of float64;
    context_ids and output_counts i32 [num_context]; context_starts i32 [num_rows + 1].
    Source: llama.cpp, llama_sampler_penalties_apply; counts of the output alone, as in
    OpenAI's API.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    entry = tl.load(context_starts_ptr + row) + block * BLOCK + tl.arange(0, BLOCK)
    live = entry < tl.load(context_starts_ptr + row + 1)
    token = tl.load(context_ids_ptr + entry, mask=live, other=0)
    count = tl.load(output_counts_ptr + entry, mask=live, other=0)
    setting = settings_ptr + row * _NUM_SETTINGS
    repeat, presence = _load_f64(setting + _REPEAT), _load_f64(setting + _PRESENCE)
    frequency = _load_f64(setting + _FREQUENCY)
    at = keys_ptr + as_offset(row, WIDE) * vocab_size + token
    value = _as_value(tl.load(at, mask=live, other=0))
    value = tl.where(value <= 0, value * repeat, value / repeat)
    offset = count.to(tl.float64) * frequency + presence
    tl.store(at, _as_key(tl.where(count > 0, value - offset, value)), mask=live)


@triton.jit
def sample_peaks_kernel(
    keys_ptr, parts_ptr, vocab_size, num_blocks, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """Formula: parts[row, block, 0] = the largest key of the block.
    Shapes: keys i64 [num_rows, vocab_size]; parts i64 [num_rows, num_blocks, 2].
    """
    block, row = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    at = keys_ptr + as_offset(row, WIDE) * vocab_size + token
    key = tl.load(at, mask=token < vocab_size, other=_NO_KEY)
    tl.store(parts_ptr + (row * num_blocks + block) * 2, tl.max(key, axis=0))


@triton.jit
def sample_start_kernel(
    parts_ptr, settings_ptr, states_ptr, vocab_size, num_blocks, BLOCK: tl.constexpr
):
    """Formula: states[row] = (highest key, no cut, nothing found, top_k tokens wanted, .., bad
    logits).
    Shapes: parts i64 [num_rows, num_blocks, 2]; settings i64 [num_rows, 8], bits of float64;
    states i64 [num_rows, NUM_STATES].
    """
    row, block = tl.program_id(0), tl.arange(0, BLOCK)
    live = block < num_blocks
    part = parts_ptr + (row * num_blocks + block) * 2
    highest = tl.max(tl.load(part, mask=live, other=_NO_KEY), axis=0)
    num_bad = tl.sum(tl.load(part + 1, mask=live, other=0), axis=0)
    setting = settings_ptr + row * _NUM_SETTINGS
    top_k = tl.minimum(_load_f64(setting + _TOP_K), 16777216.0).to(tl.int64)
    # Temperature 0 is the first in falling order, whatever the other filters say.
    top_k = tl.where(_load_f64(setting + _TEMPERATURE) == 0, 1, top_k)
    everything = (top_k <= 0) | (top_k > vocab_size)
    state = states_ptr + row * NUM_STATES
    tl.store(state + HIGHEST, highest)
    tl.store(state + CUT_KEY, _NO_KEY)
    tl.store(state + CUT_RANK, 0)
    tl.store(state + KEY, 0)
    tl.store(state + RANK, 0)
    tl.store(state + COUNT, tl.where(everything, vocab_size, top_k))
    tl.store(state + HELD, 0)
    tl.store(state + WANTED, 0)
    tl.store(state + BAD, num_bad)


@triton.jit
def _is_kept(key, rank, state):
    cut = tl.load(state + CUT_KEY)
    return (key > cut) | ((key == cut) & (rank >= tl.load(state + CUT_RANK)))


@triton.jit(do_not_specialize=["shift"])
def sample_bins_kernel(
    keys_ptr, states_ptr, counts_ptr, masses_ptr, shift, vocab_size, num_blocks,
    BY_RANK: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: counts[row, block, d] = how many candidates have the digit d at `shift`, and
    masses[row, block, d] = the sum of their exp(l - highest).
    Shapes: keys i64 [num_rows, vocab_size]; states i64 [num_rows, NUM_STATES]; counts i32 and
    masses i64 [num_rows, num_blocks, 16], masses as bits of float64.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    live = token < vocab_size
    key = tl.load(keys_ptr + as_offset(row, WIDE) * vocab_size + token, mask=live, other=0)
    rank = (vocab_size - 1 - token).to(tl.int64)
    state = states_ptr + row * NUM_STATES
    found_key, found_rank = tl.load(state + KEY), tl.load(state + RANK)
    if BY_RANK:
        member = (key == found_key) & ((((rank ^ found_rank) >> shift) >> 4) == 0)
        digit = (rank >> shift) & 15
    else:
        # The sign is turned over, so that digits have the order of the keys.
        member = (((key ^ found_key).to(tl.uint64) >> shift) >> 4) == 0
        digit = ((key ^ _NO_KEY) >> shift) & 15
    member = member & live & _is_kept(key, rank, state)
    relative = _as_value(key) - _as_value(tl.load(state + HIGHEST))
    weight = tl.where(member, _exp(relative), 0.0)
    bins = tl.arange(0, 16)
    inside = (digit[:, None] == bins[None, :]) & member[:, None]
    at = (row * num_blocks + block) * 16 + bins
    tl.store(counts_ptr + at, tl.sum(inside.to(tl.int32), axis=0))
    mass = tl.sum(tl.where(inside, weight[:, None], 0.0), axis=0)
    tl.store(masses_ptr + at, mass.to(tl.int64, bitcast=True))


@triton.jit(do_not_specialize=["shift"])
def sample_level_kernel(
    counts_ptr, masses_ptr, states_ptr, settings_ptr, shift, num_blocks,
    BY_MASS: tl.constexpr, BY_RANK: tl.constexpr, IS_LAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Formula: digit = the largest d such that the tokens of digits >= d are as many, or weigh as
    much, as is wanted; it is added to what is found of the cutoff.
    Shapes: counts i32 and masses i64 [num_rows, num_blocks, 16]; states i64 [num_rows,
    NUM_STATES]; settings i64 [num_rows, 8], bits of float64.
    """
    row, bins, step = tl.program_id(0), tl.arange(0, 16), tl.arange(0, TILE)
    count, mass = tl.zeros([16], tl.int32), tl.zeros([16], tl.float64)
    for start in range(0, num_blocks, TILE):
        at = (row * num_blocks + start + step)[:, None] * 16 + bins[None, :]
        live = (start + step < num_blocks)[:, None] & (bins < 16)[None, :]
        count += tl.sum(tl.load(counts_ptr + at, mask=live, other=0), axis=0)
        part = tl.load(masses_ptr + at, mask=live, other=0).to(tl.float64, bitcast=True)
        mass += tl.sum(part, axis=0)
    higher = bins[None, :] > bins[:, None]
    count_above = tl.sum(tl.where(higher, count[None, :], 0), axis=1)
    mass_above = tl.sum(tl.where(higher, mass[None, :], 0.0), axis=1)
    state = states_ptr + row * NUM_STATES
    held, wanted_count = _load_f64(state + HELD), tl.load(state + COUNT)
    if BY_MASS:
        suffices = held + (mass_above + mass) >= _load_f64(state + WANTED)
    else:
        suffices = count_above + count >= wanted_count
    reached = tl.max(tl.where(suffices & (count > 0), bins, -1), axis=0)
    # Rounding may leave all bins together a little short of what is wanted: then the last.
    lowest = tl.min(tl.where(count > 0, bins, 15), axis=0)
    digit = tl.where(reached >= 0, reached, lowest)
    held += tl.sum(tl.where(bins == digit, mass_above, 0.0), axis=0)
    wanted_count -= tl.sum(tl.where(bins == digit, count_above, 0), axis=0)
    tl.store(state + COUNT, wanted_count)
    bits = digit.to(tl.int64) << shift
    key, rank = tl.load(state + KEY), tl.load(state + RANK)
    if BY_RANK:
        rank = rank | bits
        tl.store(state + RANK, rank)
    else:
        # Digit 8 of the first level is the sign of a positive number, turned over.
        key = key | (bits ^ ((shift == 60).to(tl.int64) << 63))
        tl.store(state + KEY, key)
    if IS_LAST:
        # What was found is the cutoff now, and a search by mass would begin anew within it.
        mass_kept = held + tl.sum(tl.where(bins == digit, mass, 0.0), axis=0)
        top_p = _load_f64(settings_ptr + row * _NUM_SETTINGS + _TOP_P)
        wanted = tl.where(top_p < 1, top_p * mass_kept, float("inf")).to(tl.float64)
        tl.store(state + CUT_KEY, key)
        tl.store(state + CUT_RANK, rank)
        tl.store(state + KEY, 0)
        tl.store(state + RANK, 0)
        tl.store(state + WANTED, wanted.to(tl.int64, bitcast=True))
        tl.store(state + HELD, 0)
    else:
        tl.store(state + HELD, held.to(tl.int64, bitcast=True))


@triton.jit
def _weights(keys_ptr, state, setting, token, vocab_size):
    """Steps 5 and 6 for some tokens of a row: 0 for those that the filters leave out."""
    live = token < vocab_size
    key = tl.load(keys_ptr + token, mask=live, other=0)
    kept = live & _is_kept(key, (vocab_size - 1 - token).to(tl.int64), state)
    relative = _as_value(key) - _as_value(tl.load(state + HIGHEST))
    kept = kept & (_exp(relative) >= _load_f64(setting + _MIN_P))
    temperature = _load_f64(setting + _TEMPERATURE)
    temperature = tl.where(temperature == 0, 1.0, temperature)
    return tl.where(kept, _exp(relative / temperature), 0.0)


@triton.jit
def sample_weights_kernel(
    keys_ptr,
    states_ptr,
    settings_ptr,
    parts_ptr,
    vocab_size,
    num_blocks,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: parts[row, block, 0] = sum of exp((l - highest) / temperature) over the tokens of
    the block that every filter keeps.
    Shapes: keys i64 [num_rows, vocab_size]; states i64 [num_rows, NUM_STATES]; settings i64
    [num_rows, 8], bits of float64; parts i64 [num_rows, num_blocks, 2].
    """
    block, row = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    keys = keys_ptr + as_offset(row, WIDE) * vocab_size
    setting = settings_ptr + row * _NUM_SETTINGS
    weight = _weights(keys, states_ptr + row * NUM_STATES, setting, token, vocab_size)
    total = tl.sum(weight, axis=0)
    tl.store(parts_ptr + (row * num_blocks + block) * 2, total.to(tl.int64, bitcast=True))


@triton.jit
def sample_draw_kernel(
    keys_ptr, states_ptr, settings_ptr, parts_ptr, outcomes_ptr, next_ids_ptr, vocab_size,
    num_blocks, WIDE: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Formula: next_ids[row] = the first token, in rising id, whose cumulated weight exceeds
    uniform times the total; outcomes[row] = (that id or -1, how many logits are bad).
    Shapes: keys i64 [num_rows, vocab_size]; states i64 [num_rows, NUM_STATES]; settings i64
    [num_rows, 8], bits of float64; parts i64 [num_rows, num_blocks, 2]; outcomes i32
    [num_rows, 2]; next_ids i32 [num_rows].
    """
    row, block = tl.program_id(0), tl.arange(0, NUM_BLOCKS)
    part = parts_ptr + (row * num_blocks + block) * 2
    total = tl.load(part, mask=block < num_blocks, other=0).to(tl.float64, bitcast=True)
    cumulated = tl.cumsum(total, axis=0)
    state, setting = states_ptr + row * NUM_STATES, settings_ptr + row * _NUM_SETTINGS
    wanted = _load_f64(setting + _UNIFORM) * tl.sum(total, axis=0)
    first = tl.min(tl.where((total > 0) & (cumulated > wanted), block, NUM_BLOCKS), axis=0)
    last = tl.max(tl.where(total > 0, block, 0), axis=0)
    chosen_block = tl.minimum(first, last)
    before = tl.sum(tl.where(block < chosen_block, total, 0.0), axis=0)
    token = chosen_block * BLOCK + tl.arange(0, BLOCK)
    keys = keys_ptr + as_offset(row, WIDE) * vocab_size
    weight = _weights(keys, state, setting, token, vocab_size)
    beyond = before + tl.cumsum(weight, axis=0) > wanted
    first = tl.min(tl.where((weight > 0) & beyond, token, 0x7FFFFFFF), axis=0)
    # Rounding may leave the block a little short of its share: then its last token.
    chosen = tl.minimum(first, tl.max(tl.where(weight > 0, token, 0), axis=0))
    num_bad = tl.load(state + BAD)
    none = (num_bad > 0) | (tl.load(state + HIGHEST) <= _MINUS_INFINITY_KEY)
    chosen = tl.where(none, -1, chosen)
    _store_choice(outcomes_ptr, next_ids_ptr, row, chosen.to(tl.int32), num_bad.to(tl.int32))
