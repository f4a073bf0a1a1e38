"""numba kernel of `attention`: one work item is one token and one KV head."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.lang import cpu_kernel, inline, prange
from hypocenter.device.vector import (
    div,
    exp,
    fma,
    get,
    keep,
    load,
    load_first,
    max_lanes,
    mul,
    pick,
    splat,
    spread,
    store,
    store_first,
    sub,
    sum_lanes,
    tanh,
)

_TILE = 16
_ZERO, _ONE = np.float32(0), np.float32(1)
_NONE = np.float32(-np.inf)


@inline
def _scores(
    q: Any, q_at: int, k_cache: Any, k_at: int, head_dim: int, block_size: int, scale: float,
    softcap: float,
) -> Any:  # fmt: skip
    """Scaled and capped scores of one query against 16 keys."""
    total = splat(_ZERO)
    for d in range(head_dim):
        total = fma(load(k_cache, k_at + d * block_size), spread(q, q_at + d), total)
    total = mul(total, splat(scale))
    if softcap > _ZERO:
        total = mul(splat(softcap), tanh(div(total, splat(softcap))))
    return total


@inline
def _add_values(
    out: Any, at: int, old: float, weights: Any, low: int, high: int, v_cache: Any, v_at: int,
    head_dim: int,
) -> None:  # fmt: skip
    """out = out * old + the weighted values of keys low..high of the tile."""
    pitch = v_cache.shape[3]
    for d in range(0, head_dim, 16):
        total = mul(load_first(out, at + d, head_dim - d), splat(old))
        for key in range(low, high):
            total = fma(load(v_cache, v_at + key * pitch + d), spread(weights, key), total)
        store_first(out, at + d, total, head_dim - d)


@inline
def _attend(
    q: Any, q_at: int, out: Any, at: int, position: int, block_tables: Any, table_at: int,
    k_cache: Any, v_cache: Any, kv_head: int, scale: float, window: int, softcap: float,
    weights: Any,
) -> None:  # fmt: skip
    num_kv_heads, head_dim, block_size = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    first = max(position - window + 1, 0) if window > 0 else 0
    top, norm = _NONE, _ZERO
    for d in range(0, head_dim, 16):
        store_first(out, at + d, splat(_ZERO), head_dim - d)
    for tile in range(first // _TILE, position // _TILE + 1):
        start = tile * _TILE
        page = np.int64(get(block_tables, table_at + start // block_size)) * num_kv_heads + kv_head
        within = start % block_size
        low, high = max(first - start, 0), min(position + 1 - start, _TILE)
        k_at = page * head_dim * block_size + within
        scores = _scores(q, q_at, k_cache, k_at, head_dim, block_size, scale, softcap)
        scores = keep(scores, low, high, _NONE)
        new_top = max(top, max_lanes(scores))
        old = pick(exp(splat(top - new_top)), 0) if new_top > top else _ONE
        part = keep(exp(sub(scores, splat(new_top))), low, high, _ZERO)
        store(weights, 0, part)
        norm, top = norm * old + sum_lanes(part), new_top
        v_at = (page * block_size + within) * v_cache.shape[3]
        _add_values(out, at, old, weights, low, high, v_cache, v_at, head_dim)
    for d in range(0, head_dim, 16):
        value = div(load_first(out, at + d, head_dim - d), splat(norm))
        store_first(out, at + d, value, head_dim - d)


@inline
def _spread_load(index: int, num_tokens: int) -> int:
    """0, n - 1, 1, n - 2, ...: late tokens see more keys; this gives each thread as many."""
    return num_tokens - 1 - index // 2 if index % 2 else index // 2


@cpu_kernel
def attention(
    q: Any, counts: Any, positions: Any, sequence_rows: Any, block_tables: Any, k_cache: Any,
    v_cache: Any, out: Any, num_heads: int, scale: float, window: int, softcap: float,
) -> None:  # fmt: skip
    num_tokens, num_kv_heads, head_dim = get(counts, 0), k_cache.shape[1], k_cache.shape[2]
    group = num_heads // num_kv_heads
    for item in prange(num_tokens * num_kv_heads):
        token = _spread_load(item // num_kv_heads, num_tokens)
        kv_head = item % num_kv_heads
        weights = np.empty(_TILE, np.float32)
        table_at = get(sequence_rows, token) * block_tables.shape[1]
        for head in range(kv_head * group, (kv_head + 1) * group):
            _attend(
                q, token * q.shape[1] + head * head_dim,
                out, token * out.shape[1] + head * head_dim,
                get(positions, token), block_tables, table_at,
                k_cache, v_cache, kv_head, scale, window, softcap, weights,
            )  # fmt: skip
