"""Triton kernels of `unfused`: one program is a stretch of keys of one head of one row."""

from __future__ import annotations

from typing import Any

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset

_KEYS = 64
_EXPANDED_KEYS = 16
_TILE = 32
_ROW_KEYS = 256
_TOKENS = 256


@triton.jit
def context_lengths_kernel(
    sequence_rows_ptr, positions_ptr, counts_ptr, lengths_ptr, BLOCK: tl.constexpr
):
    """Formula: lengths[s] = 1 + the largest position of the live tokens of sequence s.
    Shapes: sequence_rows and positions i32 [max_tokens]; counts i32 [2]; lengths i32
    [num_sequences].
    """
    sequence = tl.program_id(0)
    num_tokens = tl.load(counts_ptr)
    longest = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        live = token < num_tokens
        row = tl.load(sequence_rows_ptr + token, mask=live, other=-1)
        position = tl.load(positions_ptr + token, mask=live, other=-1)
        longest = tl.maximum(longest, tl.where(row == sequence, position + 1, 0))
    tl.store(lengths_ptr + sequence, tl.max(longest, axis=0))


@triton.jit
def expand_kernel(
    cache_ptr, block_tables_ptr, lengths_ptr, out_ptr, num_kv_heads, heads_per_kv, head_dim,
    max_blocks, max_context, page_elements, key_stride, column_stride,
    BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: out[s, h, c, d] = cache[block_tables[s, c // block_size], h // heads_per_kv, c %
    block_size, d].
    Shapes: cache f16 or f32 [num_blocks, num_kv_heads, ..], whose pages are of keys or of
    values; block_tables i32 [num_sequences, max_blocks]; lengths i32 [num_sequences]; out f32
    [num_sequences, num_heads, max_context, head_dim].
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + sequence)
    start = tl.program_id(2) * KEYS
    if start >= length:
        return
    key, d = start + tl.arange(0, KEYS), tl.arange(0, BLOCK)
    written = key < length
    block = tl.load(
        block_tables_ptr + sequence * max_blocks + key // BLOCK_SIZE, mask=written, other=0
    )
    page = as_offset(block, WIDE) * num_kv_heads + head // heads_per_kv
    at = page[:, None] * page_elements + (key % BLOCK_SIZE)[:, None] * key_stride
    both = written[:, None] & (d < head_dim)[None, :]
    x = tl.load(cache_ptr + at + d[None, :] * column_stride, mask=both, other=0.0)
    row = as_offset(sequence, WIDE) * (num_kv_heads * heads_per_kv) + head
    out_at = (row * max_context + key[:, None]) * head_dim + d[None, :]
    tl.store(out_ptr + out_at, x.to(tl.float32), mask=both)


@triton.jit
def transpose_kernel(
    x_ptr,
    lengths_ptr,
    out_ptr,
    num_heads,
    max_context,
    head_dim,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Formula: out[s, h, d, c] = x[s, h, c, d].
    Shapes: x f32 [num_sequences, num_heads, max_context, head_dim]; lengths i32
    [num_sequences]; out f32 [num_sequences, num_heads, head_dim, max_context].
    """
    sequence, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    length = tl.load(lengths_ptr + sequence)
    start = tl.program_id(1) * TILE
    if start >= length:
        return
    key = start + tl.arange(0, TILE)
    d = tl.program_id(2) * TILE + tl.arange(0, TILE)
    matrix = (as_offset(sequence, WIDE) * num_heads + head) * max_context * head_dim
    both = (key < length)[:, None] & (d < head_dim)[None, :]
    x = tl.load(x_ptr + matrix + key[:, None] * head_dim + d[None, :], mask=both, other=0.0)
    inside = (d < head_dim)[:, None] & (key < length)[None, :]
    out_at = out_ptr + matrix + d[:, None] * max_context + key[None, :]
    tl.store(out_at, tl.trans(x), mask=inside)


@triton.jit
def scores_kernel(
    q_ptr, keys_ptr, sequence_rows_ptr, lengths_ptr, counts_ptr, scores_ptr, num_heads, head_dim,
    max_context, q_stride, WIDE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: scores[t, h, c] = sum over d of q[t, h, d] keys[s, h, d, c], with s the sequence
    of t.
    Shapes: q f32 [num_tokens, >= num_heads * head_dim]; keys f32 [num_sequences, num_heads,
    head_dim, max_context]; sequence_rows i32 [num_tokens]; lengths i32 [num_sequences]; counts
    i32 [2]; scores f32 [num_tokens, num_heads, max_context].
    Source: Vaswani et al., arXiv 1706.03762, section 3.2.1.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    sequence = tl.load(sequence_rows_ptr + token)
    length = tl.load(lengths_ptr + sequence)
    first = tl.program_id(2) * KEYS
    if first >= length:
        return
    key = first + tl.arange(0, KEYS)
    written = key < length
    q = q_ptr + as_offset(token, WIDE) * q_stride + head * head_dim
    matrix = (as_offset(sequence, WIDE) * num_heads + head) * head_dim * max_context
    total = tl.zeros([KEYS], tl.float32)
    for start in range(0, head_dim, BLOCK):
        d = start + tl.arange(0, BLOCK)
        column = d < head_dim
        both = column[:, None] & written[None, :]
        k_at = keys_ptr + matrix + d[:, None] * max_context + key[None, :]
        k = tl.load(k_at, mask=both, other=0.0)
        total += tl.sum(tl.load(q + d, mask=column, other=0.0)[:, None] * k, axis=0)
    row = (as_offset(token, WIDE) * num_heads + head) * max_context
    tl.store(scores_ptr + row + key, total, mask=written)


@triton.jit
def scale_scores_kernel(
    scores_ptr, sequence_rows_ptr, lengths_ptr, counts_ptr, scale, softcap, num_heads,
    max_context, HAS_SOFTCAP: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Formula: scores = softcap tanh(scale scores / softcap), in place, or scale scores where
    there is no cap.
    Shapes: scores f32 [num_tokens, num_heads, max_context]; sequence_rows i32 [num_tokens];
    lengths i32 [num_sequences]; counts i32 [2].
    Source: Gemma 2, arXiv 2408.00118, section 2 (soft caps).
    """
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    length = tl.load(lengths_ptr + tl.load(sequence_rows_ptr + token))
    key = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    written = key < length
    at = scores_ptr + (as_offset(token, WIDE) * num_heads + head) * max_context + key
    score = tl.load(at, mask=written, other=0.0) * scale
    if HAS_SOFTCAP:
        score = softcap * (2.0 / (1.0 + tl.exp(-2.0 * score / softcap)) - 1.0)
    tl.store(at, score, mask=written)


@triton.jit
def mask_kernel(
    scores_ptr, positions_ptr, sequence_rows_ptr, lengths_ptr, counts_ptr, window, num_heads,
    max_context, WIDE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Formula: scores[t, h, c] = -inf, in place, where c > position or, with a window, c <=
    position - window.
    Shapes: scores f32 [num_tokens, num_heads, max_context]; positions i32 [num_tokens];
    sequence_rows i32 [num_tokens]; lengths i32 [num_sequences]; counts i32 [2].
    """
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    length = tl.load(lengths_ptr + tl.load(sequence_rows_ptr + token))
    position = tl.load(positions_ptr + token)
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    key = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    hidden = (key < length) & ((key < first) | (key > position))
    at = scores_ptr + (as_offset(token, WIDE) * num_heads + head) * max_context + key
    tl.store(at, tl.full([KEYS], -float("inf"), tl.float32), mask=hidden)


@triton.jit
def softmax_kernel(
    scores_ptr, sequence_rows_ptr, lengths_ptr, counts_ptr, sinks_ptr, num_heads, max_context,
    HAS_SINKS: tl.constexpr, WIDE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Formula: scores = exp(scores - top) / (sum over keys of exp(scores - top) + exp(sink -
    top)), in place, with top the largest score.
    Shapes: scores f32 [num_tokens, num_heads, max_context]; sequence_rows i32 [num_tokens];
    lengths i32 [num_sequences]; counts i32 [2]; sinks f32 [num_heads].
    """
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    length = tl.load(lengths_ptr + tl.load(sequence_rows_ptr + token))
    row = scores_ptr + (as_offset(token, WIDE) * num_heads + head) * max_context
    within = tl.arange(0, KEYS)
    tops = tl.full([KEYS], -float("inf"), tl.float32)
    for start in range(0, length, KEYS):
        key = start + within
        tops = tl.maximum(tops, tl.load(row + key, mask=key < length, other=-float("inf")))
    top = tl.max(tops, axis=0)
    norms = tl.zeros([KEYS], tl.float32)
    for start in range(0, length, KEYS):
        key = start + within
        norms += tl.exp(tl.load(row + key, mask=key < length, other=-float("inf")) - top)
    norm = tl.sum(norms, axis=0)
    if HAS_SINKS:
        norm += tl.exp(tl.load(sinks_ptr + head) - top)
    for start in range(0, length, KEYS):
        key = start + within
        score = tl.load(row + key, mask=key < length, other=-float("inf"))
        tl.store(row + key, tl.exp(score - top) / norm, mask=key < length)


@triton.jit
def weighted_sum_kernel(
    weights_ptr, values_ptr, sequence_rows_ptr, lengths_ptr, counts_ptr, out_ptr, num_heads,
    head_dim, max_context, out_stride, WIDE: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: out[t, h, d] = sum over c of weights[t, h, c] values[s, h, c, d], with s the
    sequence of t.
    Shapes: weights f32 [num_tokens, num_heads, max_context]; values f32 [num_sequences,
    num_heads, max_context, head_dim]; sequence_rows i32 [num_tokens]; lengths i32
    [num_sequences]; counts i32 [2]; out f32 [num_tokens, >= num_heads * head_dim].
    Source: Vaswani et al., arXiv 1706.03762, section 3.2.1.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    sequence = tl.load(sequence_rows_ptr + token)
    length = tl.load(lengths_ptr + sequence)
    d, within = tl.arange(0, BLOCK), tl.arange(0, KEYS)
    column = d < head_dim
    weights = weights_ptr + (as_offset(token, WIDE) * num_heads + head) * max_context
    matrix = (as_offset(sequence, WIDE) * num_heads + head) * max_context * head_dim
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, length, KEYS):
        key = start + within
        written = key < length
        both = written[:, None] & column[None, :]
        v_at = values_ptr + matrix + key[:, None] * head_dim + d[None, :]
        v = tl.load(v_at, mask=both, other=0.0)
        weight = tl.load(weights + key, mask=written, other=0.0)
        total += tl.sum(weight[:, None] * v, axis=0)
    out = out_ptr + as_offset(token, WIDE) * out_stride + head * head_dim
    tl.store(out + d, total, mask=column)


def launch_lengths(plan: BoundPlan, lengths: Tensor) -> None:
    """Append context_lengths for every row of the block tables."""
    plan.add_gpu(context_lengths_kernel, grid=(lengths.shape[0],), BLOCK=_TOKENS)


def launch_expand_keys(plan: BoundPlan, cache: Tensor, block_tables: Tensor, out: Tensor) -> None:
    """Append expand of pages that hold keys column by column."""
    block_size = cache.shape[3]
    _launch_expand(
        plan, cache, block_tables, out, block_size, key_stride=1, column_stride=block_size
    )


def launch_expand_values(plan: BoundPlan, cache: Tensor, block_tables: Tensor, out: Tensor) -> None:
    """Append expand of pages that hold values row by row."""
    block_size, pitch = cache.shape[2:]
    _launch_expand(plan, cache, block_tables, out, block_size, key_stride=pitch, column_stride=1)


def _launch_expand(
    plan: BoundPlan,
    cache: Tensor,
    block_tables: Tensor,
    out: Tensor,
    block_size: int,
    *,
    key_stride: int,
    column_stride: int,
) -> None:
    """The strides are from key to key and from column to column within a page."""
    num_sequences, num_heads, max_context, head_dim = out.shape
    num_kv_heads = cache.shape[1]
    plan.add_gpu(
        expand_kernel,
        grid=(num_sequences, num_heads, triton.cdiv(max_context, _EXPANDED_KEYS)),
        num_kv_heads=num_kv_heads,
        heads_per_kv=num_heads // num_kv_heads,
        head_dim=head_dim,
        max_blocks=block_tables.shape[1],
        max_context=max_context,
        page_elements=cache.shape[2] * cache.shape[3],
        key_stride=key_stride,
        column_stride=column_stride,
        BLOCK_SIZE=block_size,
        KEYS=_EXPANDED_KEYS,
        BLOCK=triton.next_power_of_2(head_dim),
    )


def launch_transpose(plan: BoundPlan, x: Tensor) -> None:
    """Append transpose: one program for each tile of 32 x 32 of each head's keys."""
    num_sequences, num_heads, max_context, head_dim = x.shape
    tiles = (triton.cdiv(max_context, _TILE), triton.cdiv(head_dim, _TILE))
    plan.add_gpu(
        transpose_kernel,
        grid=(num_sequences * num_heads, *tiles),
        num_heads=num_heads,
        max_context=max_context,
        head_dim=head_dim,
        TILE=_TILE,
    )


def launch_scores(plan: BoundPlan, keys: Tensor, scores: Tensor) -> None:
    """Append scores: one program for 64 keys of each query head."""
    num_tokens, num_heads, max_context = scores.shape
    plan.add_gpu(
        scores_kernel,
        grid=(num_tokens, num_heads, triton.cdiv(max_context, _KEYS)),
        num_heads=num_heads,
        head_dim=keys.shape[2],
        max_context=max_context,
        KEYS=_KEYS,
        BLOCK=_TILE,
    )


def launch_scale_scores(plan: BoundPlan, scores: Tensor, softcap: float) -> None:
    """Append scale_scores: one program for 256 scores of each query head."""
    _launch_rows(plan, scale_scores_kernel, scores, HAS_SOFTCAP=softcap > 0)


def launch_mask(plan: BoundPlan, scores: Tensor) -> None:
    """Append mask: one program for 256 scores of each query head."""
    _launch_rows(plan, mask_kernel, scores)


def _launch_rows(plan: BoundPlan, kernel: Any, scores: Tensor, **constants: bool) -> None:
    num_tokens, num_heads, max_context = scores.shape
    plan.add_gpu(
        kernel,
        grid=(num_tokens, num_heads, triton.cdiv(max_context, _ROW_KEYS)),
        num_heads=num_heads,
        max_context=max_context,
        KEYS=_ROW_KEYS,
        **constants,
    )


def launch_softmax(plan: BoundPlan, scores: Tensor, sinks: Tensor | None) -> None:
    """Append softmax: one program for each query head of each token."""
    num_tokens, num_heads, max_context = scores.shape
    plan.add_gpu(
        softmax_kernel,
        grid=(num_tokens, num_heads),
        # A kernel without sinks never reads the pointer; Triton wants one all the same.
        sinks_ptr=sinks or scores,
        num_heads=num_heads,
        max_context=max_context,
        KEYS=_ROW_KEYS,
    )


def launch_weighted_sum(plan: BoundPlan, weights: Tensor, values: Tensor) -> None:
    """Append weighted_sum: one program for each query head of each token."""
    num_tokens, num_heads, max_context = weights.shape
    head_dim = values.shape[3]
    plan.add_gpu(
        weighted_sum_kernel,
        grid=(num_tokens, num_heads),
        num_heads=num_heads,
        head_dim=head_dim,
        max_context=max_context,
        KEYS=_EXPANDED_KEYS,
        BLOCK=triton.next_power_of_2(head_dim),
    )
