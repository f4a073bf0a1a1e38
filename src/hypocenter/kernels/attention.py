"""attention: causal softmax attention of query heads over the paged cache, prefill and decode.

Formula: softmax(softcap(q k / scale)) v over the keys at positions max(0, p - window + 1) .. p of
the token's own sequence; softcap(s) = c tanh(s / c) where the model has one. Keys are taken in
tiles of 16 from position 0 with a running maximum (Milakov and Gimelshein, arXiv 1805.02867), so
a token's result depends on its position alone and not on the chunk or batch it came in. A GPU does
the same with larger tiles: each is weighed by itself and they are folded in order, whether by one
program or by many that leave what they found in a `Partial`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypocenter.device.memory import allocate
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


_F32, _I32, _CACHE = (DType.F32,), (DType.I32,), (DType.F16, DType.F32)
_OUT = Arg("out", _F32, "num_tokens, >= num_heads * head_dim", "write")
_WINDOW = Scalar("window", "window >= 0", "must not be negative")
_PARTIAL = (
    Arg("values", _F32, "max_tokens, num_heads, max_tiles, values_pitch", "write"),
    Arg("sums", _F32, "max_tokens, num_heads, max_tiles, 2", "write"),
)
_PARTIAL_RULES = (
    Rule("max_tokens >= num_tokens", "each token of the step needs room for its tiles"),
    Rule("values_pitch >= head_dim", "a head's values must fit a row of them"),
)
_CACHES = (
    Arg("k_cache", _CACHE, "num_blocks, num_kv_heads, head_dim, block_size"),
    Arg("v_cache", _CACHE, "num_blocks, num_kv_heads, block_size, value_pitch"),
    Arg("q", _F32, "num_tokens, >= num_heads * head_dim"),
)
_TOKENS = (
    Arg(
        "block_tables",
        _I32,
        "num_sequences, max_blocks",
        index=Index("num_blocks", "the cache", live=_live_blocks),
    ),
    Arg(
        "sequence_rows",
        _I32,
        ">= num_tokens",
        index=Index("num_sequences", "block_tables", live=live_rows("sequence_rows")),
    ),
    Arg(
        "positions",
        _I32,
        ">= num_tokens",
        index=Index("max_blocks * block_size", "a block table", live=live_rows("positions")),
    ),
    live_counts("num_tokens", 0),
)
_RULES = (
    Scalar("num_heads", "num_heads > 0", "must be above 0"),
    Scalar("scale", "scale > 0", "must be above 0"),
    _WINDOW,
    Scalar("softcap", "softcap >= 0", "must not be negative"),
    Rule("num_heads % num_kv_heads == 0", "query heads must share KV heads evenly"),
    Rule("block_size % 16 == 0", "keys are taken in tiles of 16"),
    Rule("value_pitch >= -(-head_dim // 16) * 16", "values are read as whole vectors of 16"),
)

CONTRACT = Contract("attention", *_CACHES, _OUT, *_TOKENS, *_RULES)
SPLIT = Contract(
    "attention_split",
    *(*_CACHES, *_PARTIAL, *_TOKENS, *_RULES, *_PARTIAL_RULES),
    Scalar("keys_per_tile", "keys_per_tile > 0", "must be above 0"),
    Rule("max_tiles * keys_per_tile >= max_blocks * block_size", "each key needs a tile"),
)
FOLD = Contract(
    "attention_fold",
    *(replace(arg, access="read") for arg in _PARTIAL),
    _OUT,
    Arg(
        "positions",
        _I32,
        ">= num_tokens",
        index=Index("max_tiles * keys_per_tile", "the tiles", live=live_rows("positions")),
    ),
    live_counts("num_tokens", 0),
    Scalar("head_dim", "head_dim > 0", "must be above 0"),
    _WINDOW,
    Scalar("keys_per_tile", "keys_per_tile > 0", "must be above 0"),
    *_PARTIAL_RULES,
)


@dataclass(frozen=True, slots=True)
class Partial:
    """What tiles of keys leave for the fold, for all layers and plans of a decoder on a GPU.

    values f32 [max_tokens, num_heads, max_tiles, head_dim padded to 16]: weighted sums of values;
    sums f32 [max_tokens, num_heads, max_tiles, 2]: the largest score and the sum of weights.
    """

    values: Tensor
    sums: Tensor

    @classmethod
    def allocate(
        cls, k_cache: Tensor, max_tokens: int, num_heads: int, max_blocks: int, *, device: str
    ) -> Partial:
        """Room for `max_tokens` tokens of up to `max_blocks` pages of a cache like `k_cache`."""
        _, _, head_dim, block_size = k_cache.shape
        max_tiles = -(-max_blocks * block_size // keys_per_tile(k_cache))
        rows = (max_tokens, num_heads, max_tiles)

        def floats(name: str, width: int) -> Tensor:
            return allocate(name, "decoder", DType.F32, (*rows, width), device=device)

        return cls(floats("attention_values", -(-head_dim // 16) * 16), floats("attention_sums", 2))


def keys_per_tile(k_cache: Tensor) -> int:
    """Keys that a GPU weighs against each other before it folds them into the others.

    It follows from what the cache holds and nothing else, for the bits of results depend on it.
    """
    if k_cache.dtype is DType.F16:
        return 64 if k_cache.shape[2] <= 128 else 16
    return 16


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
    num_sequences: int | None = None,
    partial: Partial | None = None,
) -> None:
    """Append attention of q f32 [num_tokens, >= num_heads * head_dim] into out of the same shape.

    Caches as in `kv_write`; block_tables i32 [num_sequences, max_blocks]; sequence_rows and
    positions i32 [num_tokens]. window 0 and softcap 0 mean none. On a GPU `partial` makes each
    token a matter of its own, whose keys many programs share; without it a program takes several
    tokens, best of one sequence. `num_sequences` is how many sequences the tokens may belong to
    (all of the block tables when None). Neither changes a bit of the result.
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
        _on_gpu(plan, facts, num_sequences or block_tables.shape[0], partial)
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


def _on_gpu(
    plan: PlanBuilder, facts: dict[str, Any], num_sequences: int, partial: Partial | None
) -> None:
    from hypocenter.kernels import attention_gpu

    tile = keys_per_tile(facts["k_cache"])
    if partial is None:
        attention_gpu.launch_whole(plan, CONTRACT, facts, tile, num_sequences)
        return
    out, per_tile = facts.pop("out"), {"keys_per_tile": tile}
    found = {"values": partial.values, "sums": partial.sums} | per_tile
    attention_gpu.launch_split(plan, SPLIT, facts | found)
    reads = {name: facts[name] for name in ("positions", "counts", "window")}
    head_dim = facts["k_cache"].shape[2]
    attention_gpu.launch_fold(plan, FOLD, found | reads | {"out": out, "head_dim": head_dim})
