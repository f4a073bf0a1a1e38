"""One tile of keys on the CPU: what it gives to the query heads of one KV head.

A tile is weighed, by powers of two, against its own largest score; which tiles there are and how
they are folded is the business of `attention_cpu.py`. Keys and values are read and converted once
for a block of heads, whose sums stay in registers. A sum takes head elements, or keys, one by one
in order, so the size of the block changes no bit.

Pages may lie scattered, so the machine does not foresee what is next, and a core has only some
twenty lines on their way at a time and drops what it is asked for beyond that. So memory is asked
for evenly, a line for each step, in the order in which lines lie: for the values of a tile while
its scores are made, and for the keys of the tile that this thread takes next while values are
summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hypocenter.device.cpu.cache_lines import fetch, prefetch
from hypocenter.device.cpu.lang import always_inline, inline
from hypocenter.device.cpu.large_pages import LINE_BYTES
from hypocenter.device.cpu.vector import (
    LOG2_E,
    add,
    exp2,
    fma,
    get,
    keep,
    larger,
    load,
    max_lanes,
    mul,
    put,
    splat,
    store,
    sum_lanes,
    tanh,
)
from hypocenter.device.cpu.vector_blocks import (
    BLOCK,
    key_scales,
    load_keys,
    load_values,
    num_columns,
)
from hypocenter.device.cpu.vector_ir import LANES
from hypocenter.device.cpu.vector_rows import fma_outer, splat_each, store_outer
from hypocenter.kernels.attention.attention_layout import (
    KEYS,
    VECTORS,
    VECTORS_OF_ONE_HEAD,
    WIDE,
)
from hypocenter.kernels.attention.kv_write_cpu import page_steps

_STRIPS = KEYS // LANES
#: Where `starts` has the strips of the tile that is next.
NEXT = _STRIPS
_V_STARTS = 2 * _STRIPS
_COLUMNS = 2 * _V_STARTS
_ZERO, _NONE = np.float32(0), np.float32(-np.inf)


@inline
def num_starts(pitch: int) -> int:
    return _COLUMNS + pitch // LANES


@inline
def find_columns(starts: Any, value_pitch: int, pitch: int) -> None:
    """Note where the vectors of a row of values begin; the last again where a block needs more."""
    for d in range(0, pitch, LANES):
        put(starts, _COLUMNS + d // LANES, min(d, value_pitch - LANES))


@inline
def first_key(position: int, window: int) -> int:
    """The first key that the token at a position sees."""
    return max(position - window + 1, 0) if window > 0 else 0


@inline
def visible_keys(tile: int, position: int, window: int) -> Any:
    """Which keys of a tile the token at a position sees: from one to before another."""
    low = max(first_key(position, window) - tile * KEYS, 0)
    return low, min(position + 1 - tile * KEYS, KEYS)


@inline
def find_strips(
    starts: Any, at: int, tile: int, position: int, window: int, block_tables: Any, table_at: int,
    k_cache: Any, v_cache: Any, kv_head: int,
) -> None:  # fmt: skip
    """Note from `at` on where each strip of 16 keys of a tile begins in both caches.

    Strips that have no key which the token at `position` sees stand for their nearest neighbour.
    """
    low, high = visible_keys(tile, position, window)
    block_size, value_pitch = k_cache.shape[3], v_cache.shape[3]
    first, last = low // LANES, (high - 1) // LANES
    place, within = divmod(tile * KEYS + first * LANES, block_size)
    block = get(block_tables, table_at + place)
    k_block, k_head = page_steps(k_cache)
    v_block, v_head = page_steps(v_cache)
    k_at, v_at = kv_head * k_head, kv_head * v_head
    for strip in range(_STRIPS):
        put(starts, at + strip, k_at + block * k_block + within)
        put(starts, at + _V_STARTS + strip, v_at + block * v_block + within * value_pitch)
        if first <= strip < last:
            within += LANES
            if within == block_size:
                place, within = place + 1, 0
                block = get(block_tables, table_at + place)


@inline
def fetch_keys(starts: Any, low: int, high: int, k_cache: Any) -> None:
    """Bring the keys low..high of a tile into the cache."""
    rows_of_a_line = max(LINE_BYTES // k_cache.itemsize // k_cache.shape[3], 1)
    for strip in range(low // LANES, (high + LANES - 1) // LANES):
        at = get(starts, strip)
        for d in range(0, k_cache.shape[2], rows_of_a_line):
            fetch(k_cache, at + d * k_cache.shape[3], LANES)


@inline
def take_next(starts: Any) -> None:
    """The strips of the next tile are those of the tile."""
    for strip in range(_STRIPS):
        put(starts, strip, get(starts, NEXT + strip))
        put(starts, _V_STARTS + strip, get(starts, NEXT + _V_STARTS + strip))


@inline
def _mask(weights: Any, at: int, low: int, high: int, scale: float, softcap: float) -> float:
    """Cap the products of one head; -inf outside low..high. Returns the largest."""
    top = splat(_NONE)
    for key in range(low // LANES * LANES, high, LANES):
        scores = load(weights, at + key)
        is_cut = key < low or key + LANES > high
        if softcap > _ZERO:
            scores = mul(splat(softcap), tanh(mul(scores, splat(scale / softcap))))
        if is_cut:
            scores = keep(scores, low - key, high - key, _NONE)
        if is_cut or softcap > _ZERO:
            store(weights, at + key, scores)
        top = larger(top, scores)
    largest: float = max_lanes(top)
    return largest


@inline
def _weigh(weights: Any, at: int, low: int, high: int, factor: float, top: float) -> float:
    """Make scores weights, 2**(score * factor - top), and return their sum.

    A masked one adds 1.2e-38 (see `exp2`): nothing, beside the 1 of the largest.
    """
    total = splat(_ZERO)
    for key in range(low // LANES * LANES, high, LANES):
        part = exp2(fma(load(weights, at + key), splat(factor), splat(-top)))
        store(weights, at + key, part)
        total = add(total, part)
    norm: float = sum_lanes(total)
    return norm


@inline
def _soften(
    heads: int, weights: Any, weights_at: int, low: int, high: int, scale: float, softcap: float,
    out: Any, top_at: int, row: int,
) -> None:  # fmt: skip
    """Products of a block of heads to weights; what they are relative to, and their sums, to out.

    Two loops, so that the next head's largest score need not wait for this one's weights.
    """
    factor = LOG2_E if softcap > _ZERO else LOG2_E * scale
    for head in range(heads):
        top = _mask(weights, weights_at + head * KEYS, low, high, scale, softcap)
        put(out, top_at + head * row, top * factor)
    for head in range(heads):
        top = get(out, top_at + head * row)
        norm = _weigh(weights, weights_at + head * KEYS, low, high, factor, top)
        put(out, top_at + head * row + 1, norm)


def _add_block(heads: int, vectors: int) -> Callable[..., Any]:
    """What sums up products with keys, for a tile of that form."""
    width = LANES * vectors

    def add_block(
        q: Any,
        q_at: int,
        k_cache: Any,
        v_cache: Any,
        starts: Any,
        strip: int,
        begin: int,
        end: int,
        ahead: int,
        sums: Any,
    ) -> Any:
        """`sums` and what the columns begin..end, of one block if keys are blocks, add to them."""
        block_size = k_cache.shape[3]
        scales = key_scales(k_cache, starts, strip, begin, block_size, vectors)
        for d in range(begin, end):
            prefetch(v_cache, ahead, width)
            ahead += width
            keys = load_keys(k_cache, starts, strip, d, block_size, scales)
            sums = fma_outer(keys, q, q_at + heads * d, 1, sums)
        return sums

    add_block.__qualname__ = f"add_block_{heads}_{vectors}"
    return always_inline(add_block)


def _form(heads: int, vectors: int) -> Callable[..., None]:
    """A tile for blocks of `heads` heads, with `vectors` strips of keys or columns at a time."""
    num_sums, width = heads * vectors, LANES * vectors

    add_block = _add_block(heads, vectors)

    def tile(
        q: Any, q_at: int, k_cache: Any, v_cache: Any, starts: Any, low: int, high: int,
        scale: float, softcap: float, weights: Any, weights_at: int, out: Any, at: int, pitch: int,
    ) -> None:  # fmt: skip
        key_rows, block_size, value_pitch = k_cache.shape[2], k_cache.shape[3], v_cache.shape[3]
        head_dim, value_dim = num_columns(k_cache, key_rows), num_columns(v_cache, value_pitch)
        first, last = low // LANES // vectors * vectors, (high + LANES - 1) // LANES
        for strip in range(first, last, vectors):
            sums = splat_each(_ZERO, num_sums)
            for part in range(vectors):
                ahead = get(starts, _V_STARTS + strip + part)
                begin, end = part * head_dim // vectors, (part + 1) * head_dim // vectors
                while begin < end:
                    stop = min(begin // BLOCK * BLOCK + BLOCK, end)
                    sums = add_block(
                        q, q_at, k_cache, v_cache, starts, strip, begin, stop, ahead, sums
                    )
                    ahead += (stop - begin) * width
                    begin = stop
            store_outer(weights, weights_at + strip * LANES, KEYS, sums, vectors)
        row = pitch + LANES
        _soften(heads, weights, weights_at, low, high, scale, softcap, out, at + pitch, row)
        for d in range(0, pitch, width):
            sums = splat_each(_ZERO, num_sums)
            for key in range(low // LANES * LANES, high, LANES):
                start = get(starts, _V_STARTS + key // LANES)
                block, within = divmod(d * KEYS + key * width, key_rows * block_size)
                ahead = within + get(starts, min(NEXT + block * block_size // LANES, 2 * NEXT - 1))
                for inner in range(max(low - key, 0), min(high - key, LANES)):
                    prefetch(k_cache, ahead + inner * width, width)
                    value_at = start + inner * value_pitch
                    values = load_values(
                        v_cache, starts, _COLUMNS + d // LANES, d, value_dim, value_at, vectors
                    )
                    sums = fma_outer(values, weights, weights_at + key + inner, KEYS, sums)
            store_outer(out, at + d, row, sums, vectors)

    # Machine code goes by this name, which must be its own: see `CpuKernel.shared`.
    tile.__qualname__ = f"tile_{heads}_{vectors}"
    return inline(tile)


_tile_1 = _form(1, VECTORS_OF_ONE_HEAD)
_tile_4 = _form(4, VECTORS)
_tile_8 = _form(8, VECTORS) if WIDE else _tile_4


@inline
def tile(
    heads: int, q: Any, q_at: int, k_cache: Any, v_cache: Any, starts: Any, low: int, high: int,
    scale: float, softcap: float, weights: Any, weights_at: int, out: Any, at: int, pitch: int,
) -> None:  # fmt: skip
    """Keys low..high of a tile for one block of heads.

    q f32 [head_dim, heads] at `q_at`; `starts` of `find_strips` and `find_columns`; room for f32
    [heads, KEYS] at `weights_at`. Writes out[heads, pitch + 16] at `at`: sums of weighted values,
    then the largest score as a power of two, which is times log2 e, and the sum of weights.
    """
    if heads == 8:
        _tile_8(
            q,
            q_at,
            k_cache,
            v_cache,
            starts,
            low,
            high,
            scale,
            softcap,
            weights,
            weights_at,
            out,
            at,
            pitch,
        )
    elif heads == 4:
        _tile_4(
            q,
            q_at,
            k_cache,
            v_cache,
            starts,
            low,
            high,
            scale,
            softcap,
            weights,
            weights_at,
            out,
            at,
            pitch,
        )
    else:
        _tile_1(
            q,
            q_at,
            k_cache,
            v_cache,
            starts,
            low,
            high,
            scale,
            softcap,
            weights,
            weights_at,
            out,
            at,
            pitch,
        )
