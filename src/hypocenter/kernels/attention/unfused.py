"""unfused: attention as its textbook steps, each an op over memory; GPU devices only.

softmax(mask(softcap(q k^T * scale))) v: context_lengths, expand, transpose, scores, scale_scores,
mask, softmax, weighted_sum. What `attention` fuses is checked against these, and they show which
step of it goes wrong. Each row of the block tables is one sequence; c counts its keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import BadSetting
from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import (
    Apart,
    Arg,
    Index,
    Reach,
    Rule,
    Scalar,
    Symbols,
    live_counts,
    live_rows,
)
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention.attention import SINKS
from hypocenter.settings.config import PARTS_NEED_A_GPU

_F32, _I32 = (DType.F32,), (DType.I32,)
_CACHE = (DType.F16, DType.F32)
_ROWS = Index("num_sequences", "lengths", live=live_rows("sequence_rows"))
_POSITIONS = Index("max_context", "the context", live=live_rows("positions"))
_LENGTHS = Arg("lengths", _I32, "num_sequences", index=Index("max_context + 1", "the context"))


def _live_blocks(values: Symbols) -> Array:
    """Entries of a block table that hold keys of its sequence; more are unused."""
    starts = np.arange(values["max_blocks"]) * values["block_size"]
    live: Array = starts < values["lengths"][:, None]
    return live


def _is_key(values: Symbols) -> Array:
    """A mask of [num_sequences, max_context]: what lies within each sequence."""
    inside: Array = np.arange(values["max_context"]) < values["lengths"][:, None]
    return inside


def _has_score(values: Symbols) -> Array:
    """A mask of [live tokens, 1, max_context]: the keys of each token's sequence."""
    rows = values["sequence_rows"][: values["counts"][0]]
    scored: Array = _is_key(values)[rows, None]
    return scored


def _is_hidden(values: Symbols) -> Array:
    """A mask of the same shape: the keys that a token must not see."""
    key, window = np.arange(values["max_context"]), values["window"]
    position = values["positions"][: values["counts"][0], None, None]
    hidden: Array = _has_score(values) & (
        (key > position) | ((key <= position - window) if window else False)
    )
    return hidden


_KEYS = Reach("up to the length of each sequence", lambda values: _is_key(values)[:, None, :, None])
_TRANSPOSED = Reach(_KEYS.of, lambda values: _is_key(values)[:, None, None])
_OWN_KEYS = Reach("up to the length of each token's sequence", _has_score)
_HIDDEN = Reach("where a token must not see a key of its sequence", _is_hidden)


def _of_expand(*cache_shape: str) -> tuple[Arg, ...]:
    return (
        Arg("cache", _CACHE, ", ".join(cache_shape)),
        Arg("out", _F32, "num_sequences, num_heads, max_context, head_dim", "write", reach=_KEYS),
        _LENGTHS,
        Arg(
            "block_tables",
            _I32,
            "num_sequences, max_blocks",
            index=Index("num_blocks", "the cache", live=_live_blocks),
        ),
    )


_EXPAND_RULES = (
    Rule("num_heads % num_kv_heads == 0", "query heads must share KV heads evenly"),
    Rule("max_context <= max_blocks * block_size", "a block table must reach over the context"),
)


def _scores(access: str, reach: Reach = _OWN_KEYS, *, hides: bool = False) -> Arg:
    shape = "num_tokens, num_heads, max_context"
    return Arg("scores", _F32, shape, access, reach=reach, hides=hides)


# What the ops over rows of scores have in common.
_PER_TOKEN = (
    Arg("lengths", _I32, "num_sequences", index=Index("max_context + 1", "the context")),
    Arg("sequence_rows", _I32, ">= num_tokens", index=_ROWS),
    live_counts("num_tokens", 0),
)

CONTEXT_LENGTHS = Contract(
    "context_lengths",
    Arg("lengths", _I32, "num_sequences", "write"),
    Arg("sequence_rows", _I32, "max_tokens", index=_ROWS),
    Arg("positions", _I32, "max_tokens", index=_POSITIONS),
    live_counts("max_tokens", 0),
    Scalar("max_context", "max_context > 0", "must be above 0"),
)
EXPAND_KEYS = Contract(
    "expand",
    *_of_expand("num_blocks", "num_kv_heads", "head_dim", "block_size"),
    *_EXPAND_RULES,
)
EXPAND_VALUES = Contract(
    "expand",
    *_of_expand("num_blocks", "num_kv_heads", "block_size", "value_pitch"),
    *_EXPAND_RULES,
    Rule("value_pitch >= head_dim", "a value must fit its row of the page"),
)
TRANSPOSE = Contract(
    "transpose",
    Arg("x", _F32, "num_sequences, num_heads, max_context, head_dim"),
    Arg("out", _F32, "num_sequences, num_heads, head_dim, max_context", "write", reach=_TRANSPOSED),
    _LENGTHS,
    Apart("out", "x"),
)
SCORES = Contract(
    "scores",
    Arg("keys", _F32, "num_sequences, num_heads, head_dim, max_context"),
    _scores("write"),
    Arg("q", _F32, "num_tokens, >= num_heads * head_dim"),
    *_PER_TOKEN,
)
SCALE_SCORES = Contract(
    "scale_scores",
    _scores("both"),
    *_PER_TOKEN,
    Scalar("scale", "scale > 0", "must be above 0"),
    Scalar("softcap", "softcap >= 0", "must not be negative"),
)
MASK = Contract(
    "mask",
    _scores("both", _HIDDEN, hides=True),
    *_PER_TOKEN,
    Arg("positions", _I32, ">= num_tokens", index=_POSITIONS),
    Scalar("window", "window >= 0", "must not be negative"),
)
SOFTMAX = Contract("softmax", _scores("both"), SINKS, *_PER_TOKEN)
WEIGHTED_SUM = Contract(
    "weighted_sum",
    Arg("weights", _F32, "num_tokens, num_heads, max_context"),
    Arg("values", _F32, "num_sequences, num_heads, max_context, head_dim"),
    Arg("out", _F32, "num_tokens, >= num_heads * head_dim", "write"),
    *_PER_TOKEN,
)

_CONTEXT_LENGTHS = Op(CONTEXT_LENGTHS, gpu="attention.unfused_gpu.launch_lengths")
_EXPAND_KEYS = Op(EXPAND_KEYS, gpu="attention.unfused_gpu.launch_expand_keys")
_EXPAND_VALUES = Op(EXPAND_VALUES, gpu="attention.unfused_gpu.launch_expand_values")
_TRANSPOSE = Op(TRANSPOSE, gpu="attention.unfused_gpu.launch_transpose")
_SCORES = Op(SCORES, gpu="attention.unfused_gpu.launch_scores")
_SCALE_SCORES = Op(SCALE_SCORES, gpu="attention.unfused_gpu.launch_scale_scores")
_MASK = Op(MASK, gpu="attention.unfused_gpu.launch_mask")
_SOFTMAX = Op(SOFTMAX, gpu="attention.unfused_gpu.launch_softmax")
_WEIGHTED_SUM = Op(WEIGHTED_SUM, gpu="attention.unfused_gpu.launch_weighted_sum")


@dataclass(frozen=True, slots=True)
class Rows:
    """Which sequence each token is of, how many keys each sequence has, how many tokens are live.

    sequence_rows i32 [>= num_tokens], lengths i32 [num_sequences], counts i32 [2].
    """

    sequence_rows: Tensor
    lengths: Tensor
    counts: Tensor

    @property
    def arguments(self) -> dict[str, Tensor]:
        """These, by the names that contracts and kernels have for them."""
        return {
            "sequence_rows": self.sequence_rows,
            "lengths": self.lengths,
            "counts": self.counts,
        }


def context_lengths_reference(sequence_rows: Array, positions: Array, num_sequences: int) -> Array:
    """Keys of each sequence: one more than the last position of its tokens, 0 without tokens."""
    lengths = np.zeros(num_sequences, np.int32)
    np.maximum.at(lengths, sequence_rows, positions + 1)
    return lengths


def expand_reference(pages: Array, table: Array, num_keys: int, num_heads: int) -> Array:
    """One sequence: pages [num_blocks, num_kv_heads, block_size, dim] to [heads, keys, dim]."""
    block_size, repeat = pages.shape[2], num_heads // pages.shape[1]
    key = np.arange(num_keys)
    found = pages[table[key // block_size], :, key % block_size].astype(np.float64)
    return np.repeat(found.transpose(1, 0, 2), repeat, axis=0)


def transpose_reference(x: Array) -> Array:
    """The last two axes exchanged."""
    return np.swapaxes(x, -1, -2)


def scores_reference(q: Array, keys: Array) -> Array:
    """One sequence: q [tokens, heads, dim], keys [heads, dim, keys] to [tokens, heads, keys]."""
    out: Array = np.einsum("thd,hdc->thc", q.astype(np.float64), keys.astype(np.float64))
    return out


def scale_scores_reference(scores: Array, scale: float, softcap: float) -> Array:
    """softcap(scores * scale) in float64."""
    scaled: Array = scores.astype(np.float64) * scale
    return softcap * np.tanh(scaled / softcap) if softcap else scaled


def mask_reference(scores: Array, positions: Array, window: int) -> Array:
    """-inf where the key is after the token's position, or `window` or more before it."""
    key, position = np.arange(scores.shape[-1])[None, None, :], positions[:, None, None]
    hidden = (key > position) | ((key <= position - window) if window else False)
    return np.where(hidden, -np.inf, scores.astype(np.float64))


def softmax_reference(scores: Array, sinks: Array | None = None) -> Array:
    """Over the last axis of [tokens, heads, keys], and the sinks [heads], in float64."""
    wide = scores.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    weights = np.exp(wide - top)
    norm = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        norm = norm + np.exp(sinks[:, None] - top)
    out: Array = weights / norm
    return out


def weighted_sum_reference(weights: Array, values: Array) -> Array:
    """One sequence: weights [tokens, heads, keys], values [heads, keys, dim]; float64."""
    out: Array = np.einsum("thc,hcd->thd", weights.astype(np.float64), values.astype(np.float64))
    return out


def context_lengths(plan: PlanBuilder, rows: Rows, positions: Tensor, *, max_context: int) -> None:
    """Append rows.lengths = how many keys each sequence has once this step's are written.

    positions i32 [max_tokens], as many as rows.sequence_rows, below `max_context`.
    """
    plan.add(_CONTEXT_LENGTHS, **rows.arguments, positions=positions, max_context=max_context)


def expand_keys(
    plan: PlanBuilder, cache: Tensor, block_tables: Tensor, lengths: Tensor, out: Tensor
) -> None:
    """Append out f32 [num_sequences, num_heads, max_context, head_dim] = each query head's keys.

    `cache` as the k_cache of `kv_write`; query heads that share a KV head get a copy each.
    """
    plan.add(_EXPAND_KEYS, cache=cache, block_tables=block_tables, lengths=lengths, out=out)


def expand_values(
    plan: PlanBuilder, cache: Tensor, block_tables: Tensor, lengths: Tensor, out: Tensor
) -> None:
    """Append the same of values; `cache` as the v_cache of `kv_write`."""
    plan.add(_EXPAND_VALUES, cache=cache, block_tables=block_tables, lengths=lengths, out=out)


def transpose(plan: PlanBuilder, x: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Append out [..., head_dim, max_context] = x f32 [..., max_context, head_dim] transposed."""
    plan.add(_TRANSPOSE, x=x, lengths=lengths, out=out)


def scores(plan: PlanBuilder, q: Tensor, keys: Tensor, rows: Rows, scores: Tensor) -> None:
    """Append scores f32 [num_tokens, num_heads, max_context] = q k^T over each sequence's keys.

    q f32 [num_tokens, >= num_heads * head_dim], keys as `transpose` leaves them.
    """
    plan.add(_SCORES, **rows.arguments, q=q, keys=keys, scores=scores)


def scale_scores(
    plan: PlanBuilder, scores: Tensor, rows: Rows, *, scale: float, softcap: float = 0.0
) -> None:
    """Append scores = softcap(scores * scale), in place; softcap 0 means none."""
    plan.add(_SCALE_SCORES, **rows.arguments, scores=scores, scale=scale, softcap=softcap)


def mask(
    plan: PlanBuilder, scores: Tensor, rows: Rows, positions: Tensor, *, window: int = 0
) -> None:
    """Append scores = -inf, in place, at keys that the token does not see; window 0 means none."""
    plan.add(_MASK, **rows.arguments, scores=scores, positions=positions, window=window)


def softmax(plan: PlanBuilder, scores: Tensor, rows: Rows, *, sinks: Tensor | None = None) -> None:
    """Append scores = softmax over each row's keys, in place; each row has a finite score.

    `sinks` f32 [>= num_heads] has one more score for each head.
    """
    plan.add(_SOFTMAX, **rows.arguments, scores=scores, sinks=sinks)


def weighted_sum(
    plan: PlanBuilder, weights: Tensor, values: Tensor, rows: Rows, out: Tensor
) -> None:
    """Append out f32 [num_tokens, >= num_heads * head_dim] = weights times each head's values."""
    plan.add(_WEIGHTED_SUM, **rows.arguments, weights=weights, values=values, out=out)


def require_gpu(device: str) -> None:
    """Raise UsageError for the CPU, which has no kernels of these."""
    if device == "cpu":
        raise BadSetting("attention", "parts", PARTS_NEED_A_GPU)
