"""Triton kernel of `linear` for float weights: the matrix units, over activations rounded alike.

A sum has one chain: the matrix unit adds 16 columns at a time to it, from the first to the last.
It is the same in tiles of every shape, so a row's result does not depend on its company; that the
unit itself adds alike in all of them is seen on hardware only (`benchmarks/gpu_ops.py` looks).

F32 weights are multiplied by x itself, without such units: each column of a chunk has a chain of
its own, from the first chunk to the last, and neighbours are added in pairs until one is left. A
router of experts is such a weight, with too few outputs for one chain each.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow, store_outputs


@triton.jit
def _numbers(pointer, IS_BF16: tl.constexpr):
    """Where bits of bf16 lie, as what they are: a tile so goes to the matrix units untouched."""
    if IS_BF16:
        return pointer.to(tl.pointer_type(tl.bfloat16), bitcast=True)
    else:
        return pointer


@triton.jit
def in_pairs(chains, OUTPUTS: tl.constexpr, ROWS: tl.constexpr):
    """[OUTPUTS, ROWS] of [OUTPUTS, ROWS, 64]: an order of its own, not that of threads."""
    chains = tl.sum(tl.reshape(chains, (OUTPUTS, ROWS, 32, 2)), axis=3)
    chains = tl.sum(tl.reshape(chains, (OUTPUTS, ROWS, 16, 2)), axis=3)
    chains = tl.sum(tl.reshape(chains, (OUTPUTS, ROWS, 8, 2)), axis=3)
    chains = tl.sum(tl.reshape(chains, (OUTPUTS, ROWS, 4, 2)), axis=3)
    chains = tl.sum(tl.reshape(chains, (OUTPUTS, ROWS, 2, 2)), axis=3)
    return tl.sum(chains, axis=2)


@triton.jit
def float_outputs(
    x_ptr, row_scales_ptr, weights_ptr, bias_ptr, out_ptr, out_stride, tile, first, num_live,
    num_columns, num_chunks, x_stride, IS_ROUNDED: tl.constexpr, IS_BF16: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one weight for ROWS rows."""
    rows = first + tl.arange(0, ROWS)
    live = rows < num_live
    at_row = as_offset(tl.minimum(rows, num_live - 1), WIDE)
    outputs, column = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, 64)
    weights = _numbers(weights_ptr, IS_BF16) + (
        as_offset(outputs // 16, WIDE) * num_chunks * 1024 + (outputs % 16) * 64
    )
    x = _numbers(x_ptr, IS_BF16) + at_row * x_stride
    if IS_ROUNDED:
        weights = weights[:, None] + column[None, :]
        x = x[None, :] + column[:, None]
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        weights = weights[:, None, None] + column[None, None, :]
        x = x[None, :, None] + column[None, None, :]
        total = tl.zeros([OUTPUTS, ROWS, 64], tl.float32)
    for start in tl.range(0, num_chunks, CHUNKS, num_stages=STAGES):
        for index in tl.static_range(CHUNKS):
            chunk = start + index
            inside = chunk < num_chunks
            if not IS_ROUNDED:
                # What lies behind the last column of x nobody made zero.
                mask = (column < num_columns - chunk * 64)[None, None, :] & live[None, :, None]
                values = tl.load(x + chunk * 64, mask=mask, other=0.0)
                w = tl.load(weights + chunk * 1024, mask=inside, other=0.0)
                # A step too many would make +0 of a chain that is -0.
                total = tl.where(inside, tl.fma(w, values, total), total)
            else:
                if index == 0:
                    w, values = tl.load(weights + chunk * 1024), tl.load(x + chunk * 64)
                else:
                    w = tl.load(weights + chunk * 1024, mask=inside, other=0.0)
                    values = tl.load(x + chunk * 64, mask=inside, other=0.0)
                total = tl.dot(w, values, total)
    if IS_ROUNDED:
        total *= tl.load(row_scales_ptr + at_row)[None, :]
    else:
        total = in_pairs(total, OUTPUTS, ROWS)
    store_outputs(
        out_ptr,
        rows[None, :],
        outputs[:, None],
        out_stride,
        total,
        bias_ptr,
        live[None, :],
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
    )


@triton.jit(do_not_specialize=["count", "num_tiles", "num_tiles_2"])
def linear_float_kernel(
    x_ptr, row_scales_ptr, counts_ptr, weights_ptr, bias_ptr, out_ptr, out_stride, weights_2_ptr,
    bias_2_ptr, out_2_ptr, out_2_stride, weights_3_ptr, bias_3_ptr, out_3_ptr, out_3_stride,
    num_tiles, num_tiles_2, count, num_columns, num_chunks, x_stride, NUM_WEIGHTS: tl.constexpr,
    IS_ROUNDED: tl.constexpr, IS_BF16: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Formula: out (+)= x @ weights.T (+ bias), of one weight or up to three.
    Shapes: x f32, f16 or bf16 bits [num_rows, >= k]; row_scales f32 [num_rows]; counts i32
    [2]; weights [n, k], packed as in `gpu_layout.py`; bias f32 [n]; out f32 [num_rows, >= n];
    of the others weights_2, bias_2, out_2, weights_3, bias_3 and out_3.
    """
    follow(OVERLAPS)
    # Programs side by side read the same weights.
    first, tile = tl.program_id(0) * ROWS, tl.program_id(1)
    if ROWS <= 16:
        first, tile = tl.program_id(1) * ROWS, tl.program_id(0)
    num_live = tl.load(counts_ptr + count)
    if first >= num_live:
        return
    # Each weight has code of its own: guarded, an access is held against that weight alone.
    if NUM_WEIGHTS == 3:
        if tile >= num_tiles + num_tiles_2:
            float_outputs(
                x_ptr,
                row_scales_ptr,
                weights_3_ptr,
                bias_3_ptr,
                out_3_ptr,
                out_3_stride,
                tile - num_tiles - num_tiles_2,
                first,
                num_live,
                num_columns,
                num_chunks,
                x_stride,
                IS_ROUNDED,
                IS_BF16,
                HAS_BIAS,
                ACCUMULATE,
                WIDE,
                OUTPUTS,
                ROWS,
                CHUNKS,
                STAGES,
            )
            return
    if NUM_WEIGHTS > 1:
        if tile >= num_tiles:
            float_outputs(
                x_ptr,
                row_scales_ptr,
                weights_2_ptr,
                bias_2_ptr,
                out_2_ptr,
                out_2_stride,
                tile - num_tiles,
                first,
                num_live,
                num_columns,
                num_chunks,
                x_stride,
                IS_ROUNDED,
                IS_BF16,
                HAS_BIAS,
                ACCUMULATE,
                WIDE,
                OUTPUTS,
                ROWS,
                CHUNKS,
                STAGES,
            )
            return
    float_outputs(
        x_ptr,
        row_scales_ptr,
        weights_ptr,
        bias_ptr,
        out_ptr,
        out_stride,
        tile,
        first,
        num_live,
        num_columns,
        num_chunks,
        x_stride,
        IS_ROUNDED,
        IS_BF16,
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
        OUTPUTS,
        ROWS,
        CHUNKS,
        STAGES,
    )
