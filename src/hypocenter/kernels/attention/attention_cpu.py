"""numba kernels of `attention`: which tiles of keys a token sees, and how they are folded.

One work item is one token and one KV head with all its query heads; where such pairs are few, one
tile of keys of them, and a second kernel folds what the tiles leave. Either way tiles are weighed
one by one and folded in order, so a result depends neither on that nor on the number of threads.

What a tile leaves and what tiles are folded into has one `attention_layout.Layout`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import allocating_kernel, cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import (
    LOG2_E,
    add,
    div,
    exp2,
    fma,
    get,
    load,
    mul,
    pick,
    put,
    splat,
    store,
    store_first,
)
from hypocenter.device.cpu.vector_blocks import num_columns
from hypocenter.device.cpu.vector_ir import LANES
from hypocenter.kernels.attention.attention_layout import KEYS, MANY_PAIRS
from hypocenter.kernels.attention.attention_tile_cpu import (
    NEXT,
    fetch_keys,
    find_columns,
    find_strips,
    first_key,
    num_starts,
    take_next,
    tile,
    visible_keys,
)
from hypocenter.kernels.linear.quantise_cpu import put_codes

_ZERO = np.float32(0)


@inline
def _num_tiles(position: int, window: int) -> int:
    first: int = first_key(position, window) // KEYS
    return position // KEYS - first + 1


@inline
def _transpose(
    q: Any,
    q_at: int,
    transposed: Any,
    transposed_at: int,
    group: int,
    num_padded: int,
    heads: int,
    head_dim: int,
) -> None:
    """Lay q out as `tile` reads it: blocks [head_dim, heads]."""
    for head in range(num_padded):
        at = transposed_at + head // heads * heads * head_dim + head % heads
        if head < group:
            for d in range(head_dim):
                put(transposed, at + d * heads, get(q, q_at + head * head_dim + d))
        else:
            for d in range(head_dim):
                put(transposed, at + d * heads, _ZERO)


@inline
def _fold(into: Any, at: int, part: Any, part_at: int, num_heads: int, pitch: int) -> None:
    """Fold what a tile left into that of the tiles before it."""
    for _ in range(num_heads):
        old_top, new_top = get(into, at + pitch), get(part, part_at + pitch)
        top = max(old_top, new_top)
        old, new = exp2(splat(old_top - top)), exp2(splat(new_top - top))
        for d in range(0, pitch, LANES):
            total = mul(load(into, at + d), old)
            store(into, at + d, fma(load(part, part_at + d), new, total))
        norm = get(into, at + pitch + 1) * pick(old, 0)
        put(into, at + pitch + 1, norm + get(part, part_at + pitch + 1) * pick(new, 0))
        put(into, at + pitch, top)
        at, part_at = at + pitch + LANES, part_at + pitch + LANES


@inline
def _finish(
    out: Any, sinks: Any, codes: Any, scales: Any, sums: Any, weighted: Any, token: int,
    kv_head: int, state: Any, at: int, group: int, pitch: int, value_dim: int,
) -> None:  # fmt: skip
    """The outputs of a pair, and their codes where there is room for some.

    A head's sink is one more score, of no value: the others are divided by its part too.
    """
    first = kv_head * group * value_dim
    out_at = token * out.shape[1] + first
    for head in range(group):
        row_at = at + head * (pitch + LANES)
        norm = splat(get(state, row_at + pitch + 1))
        if sinks.shape[0] > 0:
            sink = get(sinks, kv_head * group + head) * LOG2_E
            norm = add(norm, exp2(splat(sink - get(state, row_at + pitch))))
        for d in range(0, value_dim, LANES):
            value = div(load(state, row_at + d), norm)
            store_first(out, out_at + head * value_dim + d, value, value_dim - d)
    for column in range(0, group * value_dim if codes.shape[0] > 0 else 0, 32):
        put_codes(
            load(out, out_at + column),
            load(out, out_at + column + LANES),
            codes,
            scales,
            sums,
            weighted,
            token,
            (first + column) // 32,
        )


@inline
def _attend(
    q: Any, q_at: int, state: Any, state_at: int, room: Any, starts: Any, position: int,
    begin: int, end: int, block_tables: Any, table_at: int, k_cache: Any, v_cache: Any,
    kv_head: int, group: int, heads: int, scale: float, window: int, softcap: float,
    pitch: int, next_tile: int, next_position: int, next_table_at: int, next_kv_head: int,
    is_asked: bool,
) -> bool:  # fmt: skip
    """Fold tiles begin..end of one token and KV head into `state`; `next_*`: what comes after.

    `is_asked`: whether memory has been asked for the first tile's keys. Returns whether it has been
    for those of what comes after: a tile asks for as much of the next one as it has keys.
    """
    head_dim, row = num_columns(k_cache, k_cache.shape[2]), pitch + LANES
    num_padded = -(-group // heads) * heads
    weights_at = num_padded * row
    transposed_at = weights_at + heads * KEYS
    _transpose(q, q_at, room, transposed_at, group, num_padded, heads, head_dim)
    find_columns(starts, num_columns(v_cache, v_cache.shape[3]), pitch)
    for index in range(begin, end):
        if index > begin:
            take_next(starts)
        else:
            find_strips(
                starts,
                0,
                index,
                position,
                window,
                block_tables,
                table_at,
                k_cache,
                v_cache,
                kv_head,
            )
        if index + 1 < end:
            find_strips(
                starts,
                NEXT,
                index + 1,
                position,
                window,
                block_tables,
                table_at,
                k_cache,
                v_cache,
                kv_head,
            )
        else:
            find_strips(
                starts,
                NEXT,
                next_tile,
                next_position,
                window,
                block_tables,
                next_table_at,
                k_cache,
                v_cache,
                next_kv_head,
            )
        low, high = visible_keys(index, position, window)
        if not is_asked:
            fetch_keys(starts, low, high, k_cache)
        is_asked = high - low == KEYS
        target = state if index == begin else room
        at = state_at if index == begin else 0
        for head in range(0, num_padded, heads):
            tile(
                heads,
                room,
                transposed_at + head * head_dim,
                k_cache,
                v_cache,
                starts,
                low,
                high,
                scale,
                softcap,
                room,
                weights_at,
                target,
                at + head * row,
                pitch,
            )
        if index > begin:
            _fold(state, state_at, room, 0, group, pitch)
    return is_asked and begin < end


@inline
def _spread_load(index: int, num_tokens: int) -> int:
    """0, n - 1, 1, n - 2, ...: late tokens see more keys; this gives each thread as many."""
    return num_tokens - 1 - index // 2 if index % 2 else index // 2


@inline
def _pair(index: int, num_tokens: int) -> Any:
    """KV head and token of a pair: those of one KV head stand together, for tokens of a sequence
    read the same keys."""
    return index // num_tokens, _spread_load(index % num_tokens, num_tokens)


@inline
def _num_parts(
    positions: Any, num_tokens: int, num_kv_heads: int, window: int, parts: Any, size: int
) -> int:
    """Into how many items a pair is cut: one per tile, where pairs are few and `parts` has room."""
    num_pairs, most = num_tokens * num_kv_heads, 1
    if num_pairs >= MANY_PAIRS:
        return 1
    for token in range(num_tokens):
        most = max(most, _num_tiles(get(positions, token), window))
    return most if num_pairs * most * size <= parts.size else 1


@inline
def _place(item: int, num_tokens: int, num_parts: int, positions: Any, window: int) -> Any:
    """The KV head, the token and its position of an item, and its tiles: from one to before
    another."""
    part = item % num_parts
    kv_head, token = _pair(item // num_parts, num_tokens)
    position = np.int64(get(positions, token))
    begin, end = first_key(position, window) // KEYS, position // KEYS + 1
    if num_parts > 1:
        begin, end = begin + part, min(begin + part + 1, end)
    return kv_head, token, position, begin, end


@allocating_kernel
def attention(
    q: Any, counts: Any, positions: Any, sequence_rows: Any, block_tables: Any, k_cache: Any,
    v_cache: Any, out: Any, sinks: Any, codes: Any, scales: Any, sums: Any, weighted: Any,
    parts: Any, num_heads: int, value_dim: int, heads: int, pitch: int, size: int, scale: float,
    window: int, softcap: float,
) -> None:  # fmt: skip
    """Formula: out = softmax(cap(scale q k^T) over the visible keys) v, with cap(s) = softcap
    tanh(s / softcap) where there is one; a key is visible up to the token's position and within
    `window`; a sink adds exp(sink) to the divisor.
    Shapes: q f32 [num_tokens, >= num_heads * head_dim]; counts i32 [2]; positions and
    sequence_rows i32 [num_tokens]; block_tables i32 [num_sequences, max_blocks]; k_cache
    [num_blocks, num_kv_heads, head_dim, block_size] and v_cache [num_blocks, num_kv_heads,
    block_size, value_pitch], f16 or f32 or blocks of 32; sinks f32 [num_heads] or empty; out
    f32 [num_tokens, >= num_heads * value_dim], or its codes, scales, sums and weighted as
    `quantise` makes them; parts as `allocate_tile_scratch` makes it, for what tiles leave to
    the fold.
    Source: Vaswani et al., arXiv 1706.03762; online softmax of Milakov and Gimelshein, arXiv
    1805.02867; tiles as in Dao et al., arXiv 2205.14135.
    """
    num_tokens, num_kv_heads = get(counts, 0), k_cache.shape[1]
    head_dim = num_columns(k_cache, k_cache.shape[2])
    group = num_heads // num_kv_heads
    num_parts = _num_parts(positions, num_tokens, num_kv_heads, window, parts, size)
    num_items = num_tokens * num_kv_heads * num_parts
    last, is_asked = -1, False
    for item in prange(num_items):
        is_asked = is_asked and item == last + 1
        last = item
        kv_head, token, position, begin, end = _place(
            item, num_tokens, num_parts, positions, window
        )
        next_kv_head, next_token, next_position, next_begin, next_end = _place(
            min(item + 1, num_items - 1), num_tokens, num_parts, positions, window
        )
        room_size = 2 * size + heads * KEYS + size // (pitch + LANES) * head_dim
        room = np.empty(room_size, np.float32)
        starts = np.empty(num_starts(pitch), np.int64)
        state = parts if num_parts > 1 else room
        state_at = item * size if num_parts > 1 else room_size - size
        max_blocks = block_tables.shape[1]
        is_asked = _attend(
            q,
            token * q.shape[1] + kv_head * group * head_dim,
            state,
            state_at,
            room,
            starts,
            position,
            begin,
            end,
            block_tables,
            get(sequence_rows, token) * max_blocks,
            k_cache,
            v_cache,
            kv_head,
            group,
            heads,
            scale,
            window,
            softcap,
            pitch,
            # A part that its token has no tile for is none.
            min(next_begin, next_end - 1),
            next_position,
            get(sequence_rows, next_token) * max_blocks,
            next_kv_head,
            is_asked,
        )
        if num_parts == 1:
            _finish(
                out,
                sinks,
                codes,
                scales,
                sums,
                weighted,
                token,
                kv_head,
                state,
                state_at,
                group,
                pitch,
                value_dim,
            )


@cpu_kernel
def attention_fold(
    counts: Any, positions: Any, out: Any, sinks: Any, codes: Any, scales: Any, sums: Any,
    weighted: Any, parts: Any, num_heads: int, num_kv_heads: int, value_dim: int, pitch: int,
    size: int, window: int,
) -> None:  # fmt: skip
    """Formula: out = (sum over tiles of exp(top_i - top) values_i) / (sum of exp(top_i - top)
    norm_i + exp(sink - top)), with top the largest top_i; nothing where `attention` wrote out
    itself.
    Shapes: counts i32 [2]; positions i32 [num_tokens]; out f32 [num_tokens, >= num_heads *
    value_dim], or its codes, scales, sums and weighted as `quantise` makes them; sinks f32
    [num_heads] or empty; parts as `attention` left it.
    Source: Vaswani et al., arXiv 1706.03762; online softmax of Milakov and Gimelshein, arXiv
    1805.02867; tiles as in Dao et al., arXiv 2205.14135.
    """
    num_tokens, group = get(counts, 0), num_heads // num_kv_heads
    num_parts = _num_parts(positions, num_tokens, num_kv_heads, window, parts, size)
    for pair in prange(num_tokens * num_kv_heads if num_parts > 1 else 0):
        kv_head, token = _pair(pair, num_tokens)
        at = pair * num_parts * size
        for part in range(1, _num_tiles(get(positions, token), window)):
            _fold(parts, at, parts, at + part * size, group, pitch)
        _finish(
            out,
            sinks,
            codes,
            scales,
            sums,
            weighted,
            token,
            kv_head,
            parts,
            at,
            group,
            pitch,
            value_dim,
        )
