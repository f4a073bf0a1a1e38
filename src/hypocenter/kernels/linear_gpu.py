"""Triton kernels of `linear` over the packed layouts: one program is 16 outputs of one row.

A tile of packed words is contiguous in memory: 16 rows' words for BLOCK steps along the columns.
Each lane keeps its own partial sum; the lanes of one output are folded once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.gpu_lang import tl, triton
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.index_gpu import as_offset
from hypocenter.kernels.quant import LANES, Packed, padded
from hypocenter.tensor import DType


@triton.jit
def _store_outputs(
    out_ptr, at, total, bias_ptr, outputs, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr
):
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs)
    if ACCUMULATE:
        total += tl.load(out_ptr + at)
    tl.store(out_ptr + at, total)


@triton.jit(do_not_specialize=["count"])
def linear_float_kernel(
    x_ptr, counts_ptr, weights_ptr, bias_ptr, out_ptr, count, num_columns, x_stride, out_stride,
    IS_BF16: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, row = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(counts_ptr + count):
        return
    group, row = as_offset(group, WIDE), as_offset(row, WIDE)
    lane, step = tl.arange(0, 16), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, 16], tl.float32)
    tile = weights_ptr + group * num_columns * 16 + lane[None, :]
    for start in range(0, num_columns, BLOCK):
        column = start + step
        inside = column < num_columns
        w = tl.load(tile + column[:, None] * 16, mask=inside[:, None], other=0)
        if IS_BF16:
            w = (w.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
        total += w.to(tl.float32) * x[:, None]
    outputs = group * 16 + lane
    _store_outputs(
        out_ptr, row * out_stride + outputs, tl.sum(total, axis=0), bias_ptr, outputs,
        HAS_BIAS, ACCUMULATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def linear_codes_kernel(
    x_ptr, counts_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr, count, zero,
    num_words, words_per_scale, x_stride, out_stride, PER_WORD: tl.constexpr,
    HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, row = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(counts_ptr + count):
        return
    group, row = as_offset(group, WIDE), as_offset(row, WIDE)
    lane, step = tl.arange(0, 16), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, 16], tl.float32)
    words = words_ptr + group * num_words * 16 + lane[None, :]
    scale_at = group * (num_words // words_per_scale) * 16 + lane[None, :]
    for start in range(0, num_words, BLOCK):
        word_index = start + step
        inside = word_index < num_words
        word = tl.load(words + word_index[:, None] * 16, mask=inside[:, None], other=0)
        at = scale_at + (word_index // words_per_scale)[:, None] * 16
        scale = tl.load(scales_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        if HAS_MINIMA:
            low = tl.load(minima_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
        else:
            low = -zero * scale
        for j in tl.static_range(PER_WORD):
            if PER_WORD == 4:
                code = (word << (24 - 8 * j)) >> 24
            else:
                code = (word >> (8 * (j % 4) + 4 * (j // 4))) & 15
            x_at = x_ptr + row * x_stride + word_index * PER_WORD + j
            x = tl.load(x_at, mask=inside, other=0.0)
            total += (code.to(tl.float32) * scale + low) * x[:, None]
    outputs = group * 16 + lane
    _store_outputs(
        out_ptr, row * out_stride + outputs, tl.sum(total, axis=0), bias_ptr, outputs,
        HAS_BIAS, ACCUMULATE,
    )  # fmt: skip


def launch(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], count: int, accumulate: bool
) -> None:
    """Append linear: one program for 16 outputs of each row of the bucket."""
    weight, x, out, bias = (facts[name] for name in ("weight", "x", "out", "bias"))
    packed: Packed = weight.data
    grid = (padded(packed.num_rows) // LANES, x.shape[0])
    flags = {"HAS_BIAS": bias is not None, "ACCUMULATE": accumulate}
    strides = (x.strides[0], out.strides[0])
    # A kernel without bias never reads the pointer; Triton wants one all the same.
    some_bias = x if bias is None else bias
    if packed.layout.is_float:
        plan.launch_gpu(
            linear_float_kernel,
            *(x, facts["counts"], packed.parts[0], some_bias, out, count, packed.num_columns),
            *strides,
            grid=grid,
            contract=contract,
            facts=facts,
            IS_BF16=weight.dtype is DType.BF16,
            BLOCK=_block(packed.num_columns),
            **flags,
        )
        return
    words, scales, minima, zero = packed.parts
    plan.launch_gpu(
        linear_codes_kernel,
        *(x, facts["counts"], words, scales, minima, some_bias, out, count, float(zero)),
        *(packed.num_words, packed.layout.words_per_scale, *strides),
        grid=grid,
        contract=contract,
        facts=facts,
        PER_WORD=packed.layout.codes_per_word,
        HAS_MINIMA=packed.layout.has_minima,
        BLOCK=_block(packed.num_words),
        **flags,
    )


def _block(num_steps: int) -> int:
    """Steps along the columns that one tile takes: all of a short row, else 128."""
    return min(triton.next_power_of_2(num_steps), 128)
