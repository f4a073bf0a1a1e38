"""Triton kernel of `attention` over pages: one program is one query head of one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.gpu_lang import tl, triton
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.index_gpu import as_offset


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def attention_kernel(
    q_ptr, counts_ptr, positions_ptr, sequence_rows_ptr, block_tables_ptr, k_cache_ptr,
    v_cache_ptr, out_ptr, scale, softcap, window, num_kv_heads, heads_per_kv, head_dim,
    value_pitch, max_blocks, q_stride, out_stride, HAS_SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(counts_ptr):
        return
    d, key = tl.arange(0, BLOCK), tl.arange(0, BLOCK_SIZE)
    column = d < head_dim
    q = tl.load(
        q_ptr + as_offset(token, WIDE) * q_stride + head * head_dim + d, mask=column, other=0.0
    )
    position = tl.load(positions_ptr + token)
    table = block_tables_ptr + tl.load(sequence_rows_ptr + token) * max_blocks
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    top, norm = -float("inf"), 0.0
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(first // BLOCK_SIZE, position // BLOCK_SIZE + 1):
        page = as_offset(tl.load(table + block), WIDE) * num_kv_heads + head // heads_per_kv
        at = block * BLOCK_SIZE + key
        seen = (at >= first) & (at <= position)
        both = column[:, None] & seen[None, :]
        k_at = (page * head_dim + d[:, None]) * BLOCK_SIZE + key[None, :]
        k = tl.load(k_cache_ptr + k_at, mask=both, other=0.0).to(tl.float32)
        score = tl.sum(q[:, None] * k, axis=0) * scale
        if HAS_SOFTCAP:
            score = softcap * _tanh(score / softcap)
        score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        weight = tl.exp(score - new_top)
        old = tl.exp(top - new_top)
        v_at = (page * BLOCK_SIZE + key[None, :]) * value_pitch + d[:, None]
        v = tl.load(v_cache_ptr + v_at, mask=both, other=0.0).to(tl.float32)
        total = total * old + tl.sum(v * weight[None, :], axis=1)
        norm = norm * old + tl.sum(weight, axis=0)
        top = new_top
    out = out_ptr + as_offset(token, WIDE) * out_stride + head * head_dim
    tl.store(out + d, total / norm, mask=column)


def launch(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append attention for every query head of every token of the bucket."""
    q, out, k_cache, v_cache = (facts[name] for name in ("q", "out", "k_cache", "v_cache"))
    _, num_kv_heads, head_dim, block_size = k_cache.shape
    num_heads, tables = facts["num_heads"], facts["block_tables"]
    plan.launch_gpu(
        attention_kernel,
        *(q, facts["counts"], facts["positions"], facts["sequence_rows"], tables),
        *(k_cache, v_cache, out, facts["scale"], facts["softcap"], facts["window"]),
        *(num_kv_heads, num_heads // num_kv_heads, head_dim, v_cache.shape[3], tables.shape[1]),
        *(q.strides[0], out.strides[0]),
        grid=(q.shape[0], num_heads),
        contract=contract,
        facts=facts,
        HAS_SOFTCAP=facts["softcap"] > 0,
        BLOCK_SIZE=block_size,
        BLOCK=triton.next_power_of_2(head_dim),
    )
