"""Triton kernels of `unfused`: one program is a stretch of keys of one head of one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.contracts.contract import Contract
from hypocenter.device.plan import PlanBuilder
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
    x_ptr, lengths_ptr, out_ptr, num_heads, max_context, head_dim, WIDE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
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
    turned = (d < head_dim)[:, None] & (key < length)[None, :]
    out_at = out_ptr + matrix + d[:, None] * max_context + key[None, :]
    tl.store(out_at, tl.trans(x), mask=turned)


@triton.jit
def scores_kernel(
    q_ptr, keys_ptr, sequence_rows_ptr, lengths_ptr, counts_ptr, scores_ptr, num_heads, head_dim,
    max_context, q_stride, WIDE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


def add_lengths(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append context_lengths for every row of the block tables."""
    lengths = facts["lengths"]
    plan.add_gpu(
        context_lengths_kernel,
        *(facts["sequence_rows"], facts["positions"], facts["counts"], lengths),
        grid=(lengths.shape[0],),
        contract=contract,
        facts=facts,
        BLOCK=_TOKENS,
    )


def add_expand(
    plan: PlanBuilder,
    contract: Contract,
    facts: Mapping[str, Any],
    block_size: int,
    strides: tuple[int, int],
) -> None:
    """Append expand; `strides` are from key to key and from column to column within a page."""
    cache, tables, out = facts["cache"], facts["block_tables"], facts["out"]
    num_sequences, num_heads, max_context, head_dim = out.shape
    num_kv_heads = cache.shape[1]
    plan.add_gpu(
        expand_kernel,
        *(cache, tables, facts["lengths"], out, num_kv_heads, num_heads // num_kv_heads),
        *(head_dim, tables.shape[1], max_context, cache.shape[2] * cache.shape[3], *strides),
        grid=(num_sequences, num_heads, triton.cdiv(max_context, _EXPANDED_KEYS)),
        contract=contract,
        facts=facts,
        BLOCK_SIZE=block_size,
        KEYS=_EXPANDED_KEYS,
        BLOCK=triton.next_power_of_2(head_dim),
    )


def add_transpose(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append transpose: one program for each tile of 32 x 32 of each head's keys."""
    x = facts["x"]
    num_sequences, num_heads, max_context, head_dim = x.shape
    tiles = (triton.cdiv(max_context, _TILE), triton.cdiv(head_dim, _TILE))
    plan.add_gpu(
        transpose_kernel,
        *(x, facts["lengths"], facts["out"], num_heads, max_context, head_dim),
        grid=(num_sequences * num_heads, *tiles),
        contract=contract,
        facts=facts,
        TILE=_TILE,
    )


def add_scores(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append scores: one program for 64 keys of each query head."""
    q, keys, scores = facts["q"], facts["keys"], facts["scores"]
    num_tokens, num_heads, max_context = scores.shape
    plan.add_gpu(
        scores_kernel,
        *(q, keys, facts["sequence_rows"], facts["lengths"], facts["counts"], scores),
        *(num_heads, keys.shape[2], max_context, q.strides[0]),
        grid=(num_tokens, num_heads, triton.cdiv(max_context, _KEYS)),
        contract=contract,
        facts=facts,
        KEYS=_KEYS,
        BLOCK=_TILE,
    )


def add_scale(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append scale_scores: one program for 256 scores of each query head."""
    scores = facts["scores"]
    num_tokens, num_heads, max_context = scores.shape
    plan.add_gpu(
        scale_scores_kernel,
        *(scores, facts["sequence_rows"], facts["lengths"], facts["counts"]),
        *(facts["scale"], facts["softcap"], num_heads, max_context),
        grid=(num_tokens, num_heads, triton.cdiv(max_context, _ROW_KEYS)),
        contract=contract,
        facts=facts,
        HAS_SOFTCAP=facts["softcap"] > 0,
        KEYS=_ROW_KEYS,
    )


def add_mask(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append mask: one program for 256 scores of each query head."""
    scores = facts["scores"]
    num_tokens, num_heads, max_context = scores.shape
    plan.add_gpu(
        mask_kernel,
        *(scores, facts["positions"], facts["sequence_rows"], facts["lengths"], facts["counts"]),
        *(facts["window"], num_heads, max_context),
        grid=(num_tokens, num_heads, triton.cdiv(max_context, _ROW_KEYS)),
        contract=contract,
        facts=facts,
        KEYS=_ROW_KEYS,
    )


def add_softmax(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append softmax: one program for each query head of each token."""
    scores, sinks = facts["scores"], facts["sinks"]
    num_tokens, num_heads, max_context = scores.shape
    plan.add_gpu(
        softmax_kernel,
        # A kernel without sinks never reads the pointer; Triton wants one all the same.
        *(scores, facts["sequence_rows"], facts["lengths"], facts["counts"], sinks or scores),
        *(num_heads, max_context),
        grid=(num_tokens, num_heads),
        contract=contract,
        facts=facts,
        HAS_SINKS=sinks is not None,
        KEYS=_ROW_KEYS,
    )


def add_weighted_sum(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append weighted_sum: one program for each query head of each token."""
    weights, values, out = facts["weights"], facts["values"], facts["out"]
    num_tokens, num_heads, max_context = weights.shape
    head_dim = values.shape[3]
    plan.add_gpu(
        weighted_sum_kernel,
        *(weights, values, facts["sequence_rows"], facts["lengths"], facts["counts"], out),
        *(num_heads, head_dim, max_context, out.strides[0]),
        grid=(num_tokens, num_heads),
        contract=contract,
        facts=facts,
        KEYS=_EXPANDED_KEYS,
        BLOCK=triton.next_power_of_2(head_dim),
    )
