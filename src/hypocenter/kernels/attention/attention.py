"""attention: causal softmax attention of query heads over the paged cache, prefill and decode.

Formula: softmax(softcap(q k / scale)) v over the keys at positions max(0, p - window + 1) .. p of
the token's own sequence; softcap(s) = c tanh(s / c) where the model has one. A head may have a
sink, a score beside those of the keys that has no value (Agarwal et al., arXiv 2508.10925). Keys
are taken in tiles from position 0 (512 keys on the CPU, `keys_per_tile` on a GPU): each is weighed
by itself, and they are folded in order with a running maximum (Milakov and Gimelshein, arXiv
1805.02867). So a token's result depends on its position alone, not on the chunk or batch it came
in, nor on whether one worker takes its tiles or many do that leave what they found in scratch
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import (
    Arg,
    Index,
    Reach,
    Rule,
    Scalar,
    Symbols,
    live_counts,
    live_rows,
)
from hypocenter.device import memory
from hypocenter.device.cpu.threads import num_threads
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import attention_layout
from hypocenter.kernels.attention.kv_write import caches
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.linear.quantise import into_rounded, into_tiles, quantise


def _live_blocks(values: Symbols) -> np.ndarray[Any, Any]:
    """Entries of a block table up to the block of its sequence's last position; more are unused."""
    last = np.full(values["num_sequences"], -1)
    num_live = values["counts"][0]
    rows, positions = values["sequence_rows"][:num_live], values["positions"][:num_live]
    np.maximum.at(last, rows, positions)
    num_blocks: np.ndarray[Any, Any] = last // values["block_size"]
    return np.arange(values["max_blocks"]) <= num_blocks[:, None]


def _live_tiles(values: Symbols) -> np.ndarray[Any, Any]:
    """Tiles with keys that a live token sees, [max_tokens, 1, max_tiles, 1]."""
    num_live, size, window = values["counts"][0], values["keys_per_tile"], values["window"]
    last = values["positions"][:num_live, None]
    first = np.maximum(last - window + 1, 0) if window > 0 else np.zeros_like(last)
    tile = np.arange(values["max_tiles"])
    live = np.zeros((values["max_tokens"], 1, tile.size, 1), bool)
    live[:num_live, 0, :, 0] = (tile >= first // size) & (tile <= last // size)
    return live


_F32, _I32 = (DType.F32,), (DType.I32,)
_OUT = Arg("out", _F32, "num_tokens, >= num_heads * value_dim", "write")
_WINDOW = Scalar("window", "window >= 0", "must not be negative")
_OF_TILES = Reach("the tiles with keys that a live token sees", _live_tiles)
_PARTIAL = (
    Arg(
        "values",
        _F32,
        "max_tokens, num_heads, max_tiles, values_pitch",
        "write",
        fills="value_dim",
        reach=_OF_TILES,
    ),
    Arg("sums", _F32, "max_tokens, num_heads, max_tiles, 2", "write", reach=_OF_TILES),
)
_PARTS = Arg("parts", _F32, "num_floats", "write")
SINKS = Arg("sinks", _F32, ">= num_heads", optional=True)
_HEADS = (
    Scalar("num_heads", "num_heads > 0", "must be above 0"),
    Rule("num_heads % num_kv_heads == 0", "query heads must share KV heads evenly"),
)
_VALUES = Scalar("value_dim", "value_dim > 0", "must be above 0")
_PARTIAL_RULES = (
    Rule("max_tokens >= num_tokens", "each token of the step needs room for its tiles"),
    Rule("values_pitch >= value_dim", "a head's values must fit a row of them"),
)
_Q = Arg("q", _F32, "num_tokens, >= num_heads * head_dim")
_CACHES = (*caches("contiguous"), _Q)
_PAGES = (*caches("pages"), _Q)
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
    *_HEADS,
    Scalar("scale", "scale > 0", "must be above 0"),
    _WINDOW,
    Scalar("softcap", "softcap >= 0", "must not be negative"),
    Rule("block_size % 16 == 0", "keys are read as whole vectors of 16"),
    _VALUES,
    Rule("value_dim <= head_dim", "values must not be longer than keys"),
    Rule("value_pitch >= -(-value_dim // 16) * 16", "values are read as whole vectors of 16"),
)

CONTRACT = Contract("attention", *_CACHES, _OUT, SINKS, *_TOKENS, *_RULES)
#: How the CPU lays out what a pair of a token and a KV head comes to: `Layout` of
#: `attention_layout.py`. Both of its kernels go through `parts` by these numbers, and only one of
#: them sees the cache.
_LAYOUT = (
    Scalar("heads", "heads in (1, 4, 8)", "must be 1, 4 or 8"),
    Scalar("pitch", "pitch >= value_dim", "a head's values must fit a row of them"),
    Rule("pitch % 16 == 0", "rows are read as whole vectors of 16"),
    Scalar("size", "size > 0", "must be above 0"),
    Rule(
        "size == -(-num_heads // num_kv_heads // heads) * heads * (pitch + 16)",
        "a part is a row for each head of a group, in whole blocks",
    ),
)
#: As CONTRACT, as the CPU does it: pairs of a token and a KV head that are few may leave tiles in
#: `parts`; where it has no room for them they finish by themselves.
PAIRS = Contract("attention", *_PAGES, _OUT, SINKS, _PARTS, *_TOKENS, *_RULES, *_LAYOUT)
_FOLD_PARTS: tuple[Arg | Scalar | Rule, ...] = (
    _OUT,
    SINKS,
    replace(_PARTS, access="both"),
    Arg(
        "positions",
        _I32,
        ">= num_tokens",
        index=Index("max_context", "the context", live=live_rows("positions")),
    ),
    live_counts("num_tokens", 0),
    *_HEADS,
    Scalar("num_kv_heads", "num_kv_heads > 0", "must be above 0"),
    _VALUES,
    *_LAYOUT,
    Scalar("max_context", "max_context > 0", "must be above 0"),
    _WINDOW,
)
FOLD_PARTS = Contract("attention_fold", *_FOLD_PARTS)
_WHOLE_GROUPS = (
    *into_tiles("(num_heads * value_dim)", "num_tokens"),
    Rule("num_heads // num_kv_heads * value_dim % 32 == 0", "pairs must be whole groups of codes"),
    Rule("num_heads * value_dim % 64 == 0", "rows must be whole groups of codes, by two"),
)
#: As these, and the codes of out: of each pair by whichever of the two kernels finishes it.
PAIRS_CODES = Contract(
    "attention",
    *(*_PAGES, _OUT, SINKS, _PARTS, *_TOKENS, *_RULES, *_LAYOUT, *_WHOLE_GROUPS),
)
FOLD_PARTS_CODES = Contract("attention_fold", *_FOLD_PARTS, *_WHOLE_GROUPS)
SPLIT = Contract(
    "attention_split",
    *(*_CACHES, *_PARTIAL, *_TOKENS, *_RULES, *_PARTIAL_RULES),
    Scalar("keys_per_tile", "keys_per_tile > 0", "must be above 0"),
    Rule("max_tiles * keys_per_tile >= max_blocks * block_size", "each key needs a tile"),
)
_TILES = tuple(replace(arg, access="read", fills="", reach=None) for arg in _PARTIAL)
_FOLDED: tuple[Arg | Scalar | Rule, ...] = (
    SINKS,
    Arg(
        "positions",
        _I32,
        ">= num_tokens",
        index=Index("max_tiles * keys_per_tile", "the tiles", live=live_rows("positions")),
    ),
    live_counts("num_tokens", 0),
    _VALUES,
    _WINDOW,
    Scalar("keys_per_tile", "keys_per_tile > 0", "must be above 0"),
    *_PARTIAL_RULES,
)
FOLD = Contract("attention_fold", *_TILES, _OUT, *_FOLDED)
FOLD_ROUND = Contract(
    "attention_fold_round",
    *_TILES,
    *into_rounded("num_tokens", "num_heads * value_dim"),
    *_FOLDED,
)

_PAIRS, _PAIRS_CODES = (
    Op(
        contract,
        cpu="attention.attention_cpu.attention",
        # As if the context were full: a plan serves all lengths.
        work_per_row=lambda num_heads, value_dim, k_cache, block_tables: (
            num_heads * (k_cache.shape[2] + value_dim) * block_tables.shape[1] * k_cache.shape[3]
        ),
    )
    for contract in (PAIRS, PAIRS_CODES)
)
# Without work for many threads: tiles are few beside their keys.
_FOLD_PAIRS, _FOLD_PAIRS_CODES = (
    Op(contract, cpu="attention.attention_cpu.attention_fold")
    for contract in (FOLD_PARTS, FOLD_PARTS_CODES)
)
_WHOLE = Op(CONTRACT, gpu="attention.attention_gpu.launch_whole")
_SPLIT = Op(SPLIT, gpu="attention.attention_gpu.launch_split")
_FOLD = Op(FOLD, gpu="attention.attention_fold_gpu.launch")
_FOLD_ROUND = Op(FOLD_ROUND, gpu="attention.attention_fold_gpu.launch_rounded")


def fits_f16(v_cache: Tensor) -> bool:
    """Whether what comes of attention, which lies between values of the cache, has room in f16."""
    return v_cache.dtype is not DType.F32


@dataclass(frozen=True, slots=True)
class TileScratch:
    """What tiles of keys leave for the fold, for all layers and plans of a decoder on a GPU.

    values f32 [max_tokens, num_heads, max_tiles, value_dim padded to 16]: weighted sums of values;
    sums f32 [max_tokens, num_heads, max_tiles, 2]: the largest score and the sum of weights.
    """

    values: Tensor
    sums: Tensor

    @classmethod
    def allocate(
        cls,
        k_cache: Tensor,
        v_cache: Tensor,
        max_tokens: int,
        num_heads: int,
        max_blocks: int,
        *,
        device: str,
    ) -> TileScratch:
        """Room for `max_tokens` tokens of up to `max_blocks` pages of caches like these."""
        block_size, value_pitch = v_cache.shape[2:]
        max_tiles = -(-max_blocks * block_size // keys_per_tile(k_cache))
        rows = (max_tokens, num_heads, max_tiles)

        def floats(name: str, width: int) -> Tensor:
            return memory.allocate(name, "decoder", DType.F32, (*rows, width), device=device)

        return cls(floats("attention_values", value_pitch), floats("attention_sums", 2))


def keys_per_tile(k_cache: Tensor) -> int:
    """Keys that a GPU weighs against each other before it folds them into the others.

    It follows from what the cache holds and nothing else, for the bits of results depend on it.
    """
    if k_cache.dtype is not DType.F32:
        return 64 if k_cache.shape[2] <= 128 else 16
    return 16


def reference(
    q: np.ndarray[Any, Any],
    k: np.ndarray[Any, Any],
    v: np.ndarray[Any, Any],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """One sequence in float64: q [num_tokens, num_heads, head_dim], k and v [num_keys, kv, dim].

    Values may have fewer columns than keys. The last query stands at the last key. sinks
    [num_heads].
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
    sink = np.full(num_heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    top = np.maximum(scores.max(axis=-1, keepdims=True), sink[:, None, None])
    weights = np.exp(scores - top)
    weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink[:, None, None] - top)
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
    partial: TileScratch | None = None,
    parts: Tensor | None = None,
    codes: Operands | None = None,
    keeps_out: bool = False,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> None:
    """Append attention of q f32 [num_tokens, >= num_heads * head_dim] into out f32 [num_tokens, >=
    num_heads * value_dim].

    `value_dim` is how many columns values have (as many as keys when None). Caches as in
    `kv_write`; block_tables i32 [num_sequences, max_blocks]; sequence_rows and positions i32
    [num_tokens]. window 0 and softcap 0 mean none. On a GPU `partial` makes each token a matter of
    its own, whose keys many programs share; without it a program takes several tokens, best of one
    sequence. `num_sequences` is how many sequences the tokens may belong to (all of the block
    tables when None). `parts` of `allocate_tile_scratch` is what tiles leave on the CPU; without it
    there is room of this op's own. None of them changes a bit of the result. With `codes` its codes
    are made, as `quantise` does, and out may be left as it was on a GPU, but with `keeps_out`; the
    codes are the same with it. `sinks` f32 [>= num_heads]
    has the sink of each head.
    """
    arguments = {
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
        "sinks": sinks,
        "value_dim": value_dim or k_cache.shape[2],
    }
    if plan.device != "cpu":
        num_sequences = num_sequences or block_tables.shape[0]
        _on_gpu(plan, arguments, num_sequences, partial, codes, keeps_out=keeps_out)
        return
    _on_cpu(plan, arguments, parts, codes)


def allocate_tile_scratch(
    k_cache: Tensor, v_cache: Tensor, max_tokens: int, num_heads: int, max_blocks: int
) -> Tensor:
    """What tiles of keys leave for the fold, for all layers and plans of a decoder on the CPU.

    f32 [num_floats], for up to `max_tokens` tokens of up to `max_blocks` pages of these caches;
    empty where tokens are never cut into tiles.
    """
    max_context = max_blocks * k_cache.shape[3]
    num_floats = attention_layout.num_part_floats(
        max_tokens, num_heads, k_cache.shape[1], v_cache.shape[3], max_context
    )
    return memory.allocate("attention_parts", "decoder", DType.F32, (num_floats,))


def _on_cpu(
    plan: PlanBuilder, arguments: dict[str, Any], parts: Tensor | None, codes: Operands | None
) -> None:
    """One kernel, and another for the fold where pairs may be cut into tiles.

    Where tokens are few they make codes too. Many tokens have another kernel make them: threads
    that each have a token would take from one another the lines in which codes of several lie.
    """
    k_cache, v_cache, block_tables = (
        arguments["k_cache"],
        arguments["v_cache"],
        arguments["block_tables"],
    )
    num_heads, value_dim = arguments["num_heads"], arguments["value_dim"]
    num_kv_heads, max_blocks = k_cache.shape[1], block_tables.shape[1]
    layout = attention_layout.Layout.of(num_heads // num_kv_heads, v_cache.shape[3])
    # More than half of a bucket is live: a smaller one would have been taken.
    may_be_few = (plan.num_rows // 2 + 1) * num_kv_heads < attention_layout.MANY_PAIRS
    if parts is None:
        parts = allocate_tile_scratch(k_cache, v_cache, plan.num_rows, num_heads, max_blocks)
    # Where threads share KV heads evenly nothing is gained by smaller items.
    if not may_be_few or num_kv_heads % num_threads() == 0:
        parts = memory.rows(parts, 0, 0)
    width, pair_width = num_heads * value_dim, num_heads // num_kv_heads * value_dim
    fused = codes if may_be_few and pair_width % 32 == 0 and width % 64 == 0 else None
    written = {} if fused is None else fused.written
    plan.add(
        _PAIRS if fused is None else _PAIRS_CODES,
        **arguments,
        parts=parts,
        **layout.arguments,
        **(written or attention_layout.NO_CODES),
    )
    if parts.num_elements:
        _fold_on_cpu(plan, arguments, parts, layout, written)
    if codes is not None and fused is None:
        quantise(plan, arguments["out"], width, codes, arguments["counts"])


def _fold_on_cpu(
    plan: PlanBuilder,
    arguments: dict[str, Any],
    parts: Tensor,
    layout: attention_layout.Layout,
    written: dict[str, Tensor | None],
) -> None:
    _, num_kv_heads, _, block_size = arguments["k_cache"].shape
    names = ("positions", "counts", "out", "num_heads", "window", "sinks")
    plan.add(
        _FOLD_PAIRS_CODES if written else _FOLD_PAIRS,
        parts=parts,
        num_kv_heads=num_kv_heads,
        value_dim=arguments["value_dim"],
        **layout.arguments,
        **{name: arguments[name] for name in names},
        max_context=arguments["block_tables"].shape[1] * block_size,
        **(written or attention_layout.NO_CODES),
    )


def _on_gpu(
    plan: PlanBuilder,
    arguments: dict[str, Any],
    num_sequences: int,
    partial: TileScratch | None,
    codes: Operands | None,
    *,
    keeps_out: bool,
) -> None:
    tile, value_dim = keys_per_tile(arguments["k_cache"]), arguments["value_dim"]
    width, counts = arguments["num_heads"] * value_dim, arguments["counts"]
    is_plain = fits_f16(arguments["v_cache"])
    if partial is None:
        plan.add(_WHOLE, **arguments, keys_per_tile=tile, num_sequences=num_sequences)
        if codes is not None:
            quantise(plan, arguments["out"], width, codes, counts, is_plain=is_plain)
        return
    out, sinks = arguments.pop("out"), arguments.pop("sinks")
    tiles = {"values": partial.values, "sums": partial.sums, "keys_per_tile": tile}
    plan.add(_SPLIT, **arguments, **tiles)
    reads = {name: arguments[name] for name in ("positions", "counts", "window")}
    reads |= tiles | {"value_dim": value_dim, "sinks": sinks}
    if codes is not None and is_plain and not keeps_out:
        plan.add(_FOLD_ROUND, **reads, **codes.written)
        return
    plan.add(_FOLD, **reads, out=out)
    if codes is not None:
        quantise(plan, out, width, codes, counts, is_plain=is_plain)
