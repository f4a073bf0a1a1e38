"""attention: causal softmax attention of query heads over the paged cache, prefill and decode.

Formula: softmax(softcap(q k / scale)) v over the keys at positions max(0, p - window + 1) .. p of
the token's own sequence; softcap(s) = c tanh(s / c) where the model has one. Keys are taken in
tiles of 16 from position 0 with a running maximum (Milakov and Gimelshein, arXiv 1805.02867), so
a token's result depends on its position alone and not on the chunk or batch it came in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.plan import PlanBuilder
from hypocenter.errors import LaunchRejected
from hypocenter.kernels import attention_cpu
from hypocenter.tensor import Tensor


def reference(
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> np.ndarray[Any, Any]:
    """One sequence in float64: q [num_tokens, num_heads, head_dim], k and v [num_keys, kv, dim].

    The last query stands at the last key.
    """
    num_tokens, num_heads, _ = q.shape
    repeat = num_heads // k.shape[1]
    keys = np.repeat(k.astype(np.float64), repeat, axis=1)
    values = np.repeat(v.astype(np.float64), repeat, axis=1)
    scores = np.einsum("thd,shd->hts", q.astype(np.float64), keys) * scale
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    position = np.arange(len(k) - num_tokens, len(k))[:, None]
    key = np.arange(len(k))[None, :]
    visible = (key <= position) & ((key > position - window) if window else True)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: np.ndarray[Any, Any] = np.einsum("hts,shd->thd", weights, values)
    return out


def attention(
    plan: PlanBuilder,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    sequence_rows: Tensor,
    positions: Tensor,
    out: Tensor,
    counts: Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Append attention of q f32 [num_tokens, >= num_heads * head_dim] into out of the same shape.

    Caches as in `kv_write`; block_tables i32 [num_sequences, max_blocks]; sequence_rows and
    positions i32 [num_tokens]. window 0 and softcap 0 mean none.
    """
    num_kv_heads, head_dim, block_size = k_cache.shape[1:]
    if num_heads % num_kv_heads:
        raise LaunchRejected("attention", f"{num_heads} heads over {num_kv_heads} KV heads")
    if block_size % 16:
        raise LaunchRejected("attention", f"block_size is {block_size}, but tiles hold 16 keys")
    for tensor in (q, out):
        if tensor.shape[1] < num_heads * head_dim:
            raise LaunchRejected(
                "attention",
                f"{tensor.name} has {tensor.shape[1]} columns, but {num_heads} heads x {head_dim} "
                "are used",
            )
    plan.launch(
        attention_cpu.attention,
        *(q, counts, positions, sequence_rows, block_tables, k_cache, v_cache, out, num_heads),
        *(np.float32(scale), window, np.float32(softcap)),
        # As if the context were full: a plan serves all lengths.
        work_per_row=2 * num_heads * head_dim * block_tables.shape[1] * block_size,
    )
