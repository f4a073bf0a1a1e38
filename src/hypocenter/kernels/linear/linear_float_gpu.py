"""Triton kernels of `linear` for float weights: the matrix units, over exact pieces of f32.

Chunk c (64 columns) belongs to chain c % 4. A chunk's products are summed by the matrix unit, the
smaller pieces first; a chain adds its chunks in order, and the chains are added in order. Both
kernels keep to that; that the unit itself adds alike in both shapes is seen on hardware only
(`benchmarks/gpu_ops.py` looks).
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow, store_outputs


@triton.jit
def _number(bits, IS_BF16: tl.constexpr):
    if IS_BF16:
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        return bits


@triton.jit
def _chunk(w, x_at, plane, mask, NUM_PIECES: tl.constexpr, IS_BF16: tl.constexpr):
    """The products of one chunk, the smallest piece of x first."""
    if NUM_PIECES == 1:
        high = tl.load(x_at, mask=mask, other=0.0)
        return tl.dot(w, high, input_precision="ieee")
    else:
        w = _number(w, IS_BF16)
        if NUM_PIECES == 3:
            low = tl.load(x_at + 2 * plane, mask=mask, other=0)
            middle = tl.load(x_at + plane, mask=mask, other=0)
            high = tl.load(x_at, mask=mask, other=0)
            part = tl.dot(w, _number(low, IS_BF16))
            part = tl.dot(w, _number(middle, IS_BF16), part)
        else:
            low = tl.load(x_at + plane, mask=mask, other=0)
            high = tl.load(x_at, mask=mask, other=0)
            part = tl.dot(w, _number(low, IS_BF16))
        return tl.dot(w, _number(high, IS_BF16), part)


@triton.jit
def few_float_outputs(
    x_ptr, row_scales_ptr, weights_ptr, bias_ptr, out_ptr, out_stride, tile, first, num_live,
    num_columns, num_chunks, x_stride, plane, NUM_PIECES: tl.constexpr, IS_BF16: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """16 outputs of one weight for ROWS rows."""
    rows = first + tl.arange(0, ROWS)
    live = rows < num_live
    at_row = as_offset(tl.minimum(rows, num_live - 1), WIDE)
    chain, lane, step = tl.arange(0, 4), tl.arange(0, 16), tl.arange(0, 64)
    weights = (
        weights_ptr
        + as_offset(tile, WIDE) * num_chunks * 1024
        + ((lane * 64)[:, None] + step[None, :])[None]
        + (chain * 1024)[:, None, None]
    )
    column = (chain * 64)[:, None, None] + step[None, :, None]
    x = x_ptr + (at_row * x_stride)[None, None, :] + column
    total = tl.zeros([4, 16, ROWS], tl.float32)
    for start in tl.range(0, num_chunks, 4, num_stages=STAGES):
        w = tl.load(
            weights + start * 1024, mask=(start + chain < num_chunks)[:, None, None], other=0
        )
        mask = (column < num_columns - start * 64) & live[None, None, :]
        total += _chunk(w, x + start * 64, plane, mask, NUM_PIECES, IS_BF16)
    even, odd = tl.split(tl.reshape(tl.permute(total, (1, 2, 0)), (16, ROWS, 2, 2)))
    part0, part2 = tl.split(even)
    part1, part3 = tl.split(odd)
    result = ((part0 + part1) + part2) + part3
    if NUM_PIECES > 1:
        result *= tl.load(row_scales_ptr + at_row)[None, :]
    store_outputs(
        out_ptr,
        rows[None, :],
        (tile * 16 + lane)[:, None],
        out_stride,
        result,
        bias_ptr,
        live[None, :],
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
    )


@triton.jit(do_not_specialize=["count", "num_tiles", "num_tiles_2"])
def linear_float_few_kernel(
    x_ptr, row_scales_ptr, counts_ptr, weights_ptr, bias_ptr, out_ptr, out_stride, weights_2_ptr,
    bias_2_ptr, out_2_ptr, out_2_stride, weights_3_ptr, bias_3_ptr, out_3_ptr, out_3_stride,
    num_tiles, num_tiles_2, count, num_columns, num_chunks, x_stride, plane,
    NUM_WEIGHTS: tl.constexpr, NUM_PIECES: tl.constexpr, IS_BF16: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    tile, first = tl.program_id(0), tl.program_id(1) * ROWS
    num_live = tl.load(counts_ptr + count)
    if first >= num_live:
        return
    # Each weight has code of its own: guarded, an access is held against that weight alone.
    if NUM_WEIGHTS == 3:
        if tile >= num_tiles + num_tiles_2:
            few_float_outputs(
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
                plane,
                NUM_PIECES,
                IS_BF16,
                HAS_BIAS,
                ACCUMULATE,
                WIDE,
                ROWS,
                STAGES,
            )
            return
    if NUM_WEIGHTS > 1:
        if tile >= num_tiles:
            few_float_outputs(
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
                plane,
                NUM_PIECES,
                IS_BF16,
                HAS_BIAS,
                ACCUMULATE,
                WIDE,
                ROWS,
                STAGES,
            )
            return
    few_float_outputs(
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
        plane,
        NUM_PIECES,
        IS_BF16,
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
        ROWS,
        STAGES,
    )


@triton.jit
def many_float_outputs(
    x_ptr, row_scales_ptr, weights_ptr, bias_ptr, out_ptr, out_stride, tile, first, num_live,
    num_columns, num_chunks, num_steps, x_stride, plane, NUM_PIECES: tl.constexpr,
    IS_BF16: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, WIDE: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one weight for the rows of a tile, which end at num_live."""
    rows = first + tl.arange(0, ROWS)
    live = rows < num_live
    at_row = as_offset(tl.minimum(rows, num_live - 1), WIDE)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, 64)
    weights = (
        weights_ptr
        + (as_offset(outputs // 16, WIDE) * num_chunks * 1024 + (outputs % 16) * 64)[:, None]
        + column[None, :]
    )
    x = x_ptr + (at_row * x_stride)[None, :] + column[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(0, tl.minimum(num_chunks, 4) * num_steps, num_stages=STAGES):
        wanted = (step % num_steps) * 4 + step // num_steps
        chunk = tl.minimum(wanted, num_chunks - 1)
        w = tl.load(weights + chunk * 1024)
        # A chunk that is not there has no columns.
        mask = (column + wanted * 64 < num_columns)[:, None] & live[None, :]
        acc += _chunk(w, x + chunk * 64, plane, mask, NUM_PIECES, IS_BF16)
        if step % num_steps == num_steps - 1:
            total += acc
            acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    if NUM_PIECES > 1:
        total *= tl.load(row_scales_ptr + at_row)[None, :]
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


@triton.jit(do_not_specialize=["count"])
def linear_float_kernel(
    x_ptr, row_scales_ptr, counts_ptr, weights_ptr, bias_ptr, out_ptr, count, num_columns,
    num_chunks, num_steps, x_stride, plane, out_stride, NUM_PIECES: tl.constexpr,
    IS_BF16: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    first = tl.program_id(0) * ROWS
    num_live = tl.load(counts_ptr + count)
    if first >= num_live:
        return
    many_float_outputs(
        x_ptr,
        row_scales_ptr,
        weights_ptr,
        bias_ptr,
        out_ptr,
        out_stride,
        tl.program_id(1),
        first,
        num_live,
        num_columns,
        num_chunks,
        num_steps,
        x_stride,
        plane,
        NUM_PIECES,
        IS_BF16,
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
        OUTPUTS,
        ROWS,
        STAGES,
    )
