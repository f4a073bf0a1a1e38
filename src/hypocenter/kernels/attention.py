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
from hypocenter.kernels import attention_cpu
from hypocenter.kernels.contract import (
    Arg,
    Contract,
    Index,
    Rule,
    Scalar,
    Values,
    live_counts,
    live_rows,
)
from hypocenter.tensor import DType, Tensor


def _live_blocks(values: Values) -> np.ndarray[Any, Any]:
    """Entries of a block table up to the block of its sequence's last position; more are unused."""
    last = np.full(values["num_sequences"], -1)
    num_live = values["counts"][0]
    rows, positions = values["sequence_rows"][:num_live], values["positions"][:num_live]
    np.maximum.at(last, rows, positions)
    num_blocks: np.ndarray[Any, Any] = last // values["block_size"]
    return np.arange(values["max_blocks"]) <= num_blocks[:, None]


CONTRACT = Contract(
    "attention",
    Arg("k_cache", (DType.F16, DType.F32), "num_blocks, num_kv_heads, head_dim, block_size"),
    Arg("v_cache", (DType.F16, DType.F32), "num_blocks, num_kv_heads, block_size, value_pitch"),
    Arg("q", (DType.F32,), "num_tokens, >= num_heads * head_dim"),
    Arg("out", (DType.F32,), "num_tokens, >= num_heads * head_dim", "write"),
    Arg(
        "block_tables",
        (DType.I32,),
        "num_sequences, max_blocks",
        index=Index("num_blocks", "the cache", live=_live_blocks),
    ),
    Arg(
        "sequence_rows",
        (DType.I32,),
        ">= num_tokens",
        index=Index("num_sequences", "block_tables", live=live_rows("sequence_rows")),
    ),
    Arg(
        "positions",
        (DType.I32,),
        ">= num_tokens",
        index=Index("max_blocks * block_size", "a block table", live=live_rows("positions")),
    ),
    live_counts("num_tokens", 0),
    Scalar("num_heads", "num_heads > 0", "must be above 0"),
    Scalar("scale", "scale > 0", "must be above 0"),
    Scalar("window", "window >= 0", "must not be negative"),
    Scalar("softcap", "softcap >= 0", "must not be negative"),
    Rule("num_heads % num_kv_heads == 0", "query heads must share KV heads evenly"),
    Rule("block_size % 16 == 0", "keys are taken in tiles of 16"),
    Rule("value_pitch >= -(-head_dim // 16) * 16", "values are read as whole vectors of 16"),
)


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
    head_dim, block_size = k_cache.shape[2:]
    facts = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "q": q,
        "out": out,
        "block_tables": block_tables,
        "sequence_rows": sequence_rows,
        "positions": positions,
        "counts": counts,
        "num_heads": num_heads,
        "scale": scale,
        "window": window,
        "softcap": softcap,
    }
    if plan.device != "cpu":
        from hypocenter.kernels import attention_gpu

        attention_gpu.launch(plan, CONTRACT, facts)
        return
    plan.launch(
        attention_cpu.attention,
        *(q, counts, positions, sequence_rows, block_tables, k_cache, v_cache, out, num_heads),
        *(np.float32(scale), window, np.float32(softcap)),
        contract=CONTRACT,
        facts=facts,
        # As if the context were full: a plan serves all lengths.
        work_per_row=2 * num_heads * head_dim * block_tables.shape[1] * block_size,
    )
