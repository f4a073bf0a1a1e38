"""Triton kernels of `adapter`: a program takes rows that may have different adapters.

It goes through the adapters that one of its rows has, so rows of one adapter share what is read of
it. Each column of a chunk of 64 has a chain of its own in a sum, neighbours are added in pairs
until one is left, and outputs have one chain of ranks: alike in tiles of one row and of many.
"""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.adapter_sizes import OUTPUTS, RANKS
from hypocenter.kernels.linear.linear_float_gpu import in_pairs
from hypocenter.kernels.shared_gpu import as_offset, follow

#: Of so few rows each has programs of its own. A program waits for one part of a sum after the
#: other, however many rows it has: more of them end sooner, though they read a matrix again.
_FEW_ROWS = 64


@triton.jit
def _scales_of(scales_ptr, sequences_ptr, rows, live, owner, num_adapters):
    """What an adapter counts for each row; 0 of rows that are not live."""
    sequence = tl.load(sequences_ptr + rows, mask=live, other=0)
    return tl.load(scales_ptr + sequence * num_adapters + owner, mask=live, other=0.0)


@triton.jit
def products_with_ranks(
    x, w, active, num_columns, RANKS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr
):
    """The products of rows at `x` [1, ROWS, 64], those that are active, with ranks at `w` [RANKS,
    1, 64]: f32 [RANKS, ROWS], with a chain for each of 64 columns, which are added in pairs."""
    column = tl.arange(0, 64)
    chains = tl.zeros([RANKS, ROWS, 64], tl.float32)
    num_chunks = (num_columns + 63) // 64
    for start in range(0, num_chunks, CHUNKS):
        for index in tl.static_range(CHUNKS):
            chunk = start + index
            inside = chunk < num_chunks
            # What lies behind the last column of x nobody made zero.
            is_there = column < num_columns - chunk * 64
            mask = is_there[None, None, :] & active[None, :, None]
            values = tl.load(x + chunk * 64, mask=mask, other=0.0)
            factor = tl.load(w + chunk * 64, mask=inside, other=0.0).to(tl.float32)
            # A step too many would make +0 of a chain that is -0.
            chains = tl.where(inside, tl.fma(factor, values, chains), chains)
    return in_pairs(chains, RANKS, ROWS)


@triton.jit(do_not_specialize=["count", "num_adapters"])
def adapter_down_kernel(
    x_ptr,
    counts_ptr,
    down_ptr,
    owners_ptr,
    factors_ptr,
    scales_ptr,
    sequences_ptr,
    products_ptr,
    count,
    num_columns,
    num_adapters,
    x_stride,
    down_stride,
    products_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Formula: products[t, r] = scales[sequences[t], owners[r / 8]] factors[r / 8] (down[r] x[t]),
    and 0 where that scale is.
    Shapes: x f32 [num_rows, >= num_columns]; counts i32 [2]; down f16 or f32 [num_ranks,
    num_columns padded to 64]; owners i32 and factors f32 [num_ranks / 8]; scales f32
    [num_sequences, num_adapters]; sequences i32 [>= num_rows]; products f32 [num_rows, >=
    num_ranks].
    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """
    follow(OVERLAPS)
    tile, first = tl.program_id(0), tl.program_id(1) * ROWS
    num_live = tl.load(counts_ptr + count)
    if first >= num_live:
        return
    rows, column = first + tl.arange(0, ROWS), tl.arange(0, 64)
    live = rows < num_live
    owner = tl.load(owners_ptr + tile)
    scale = _scales_of(scales_ptr, sequences_ptr, rows, live, owner, num_adapters)
    active = scale != 0
    at_row = as_offset(tl.minimum(rows, num_live - 1), WIDE)
    rank = tile * RANKS + tl.arange(0, RANKS)
    x = x_ptr + (at_row * x_stride)[None, :, None] + column[None, None, :]
    w = down_ptr + (as_offset(rank, WIDE) * down_stride)[:, None, None] + column[None, None, :]
    total = tl.zeros([RANKS, ROWS], tl.float32)
    if tl.max(active.to(tl.int32), axis=0) > 0:
        total = products_with_ranks(x, w, active, num_columns, RANKS, ROWS, CHUNKS)
    total *= (scale * tl.load(factors_ptr + tile))[None, :]
    to = products_ptr + (at_row * products_stride)[None, :] + rank[:, None]
    tl.store(to, tl.where(active[None, :], total, 0.0), mask=live[None, :])


@triton.jit(do_not_specialize=["count", "num_adapters", "num_tiles"])
def adapter_up_kernel(
    products_ptr,
    counts_ptr,
    up_ptr,
    owners_ptr,
    scales_ptr,
    sequences_ptr,
    out_ptr,
    count,
    num_tiles,
    num_adapters,
    products_stride,
    up_stride,
    out_stride,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Formula: out[t] += up.T products[t], of ranks r where scales[sequences[t], owners[r / 8]] is
    not 0.
    Shapes: products f32 [num_rows, >= num_ranks]; counts i32 [2]; up f16 or f32 [num_ranks,
    outputs padded to 64]; owners i32 [num_ranks / 8]; scales f32 [num_sequences, num_adapters];
    sequences i32 [>= num_rows]; out f32 [num_rows, >= outputs padded to 64].
    Source: Hu et al., arXiv 2106.09685, section 4.1.
    """
    follow(OVERLAPS)
    output, first = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS
    num_live = tl.load(counts_ptr + count)
    if first >= num_live:
        return
    rows = first + tl.arange(0, ROWS)
    live = rows < num_live
    at_row = as_offset(tl.minimum(rows, num_live - 1), WIDE)
    products = products_ptr + at_row * products_stride
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    adapted = tl.zeros([ROWS], tl.int32)
    for tile in range(num_tiles):
        owner = tl.load(owners_ptr + tile)
        scale = _scales_of(scales_ptr, sequences_ptr, rows, live, owner, num_adapters)
        active = scale != 0
        if tl.max(active.to(tl.int32), axis=0) > 0:
            adapted = adapted | active.to(tl.int32)
            for index in tl.static_range(RANKS):
                rank = tile * RANKS + index
                value = tl.load(products + rank, mask=active, other=0.0)
                factor = tl.load(up_ptr + as_offset(rank, WIDE) * up_stride + output)
                sum_ = tl.fma(value[:, None], factor.to(tl.float32)[None, :], total)
                total = tl.where(active[:, None], sum_, total)
    changed = (adapted > 0)[:, None]
    out = out_ptr + (at_row * out_stride)[:, None] + output[None, :]
    tl.store(out, tl.load(out, mask=changed, other=0.0) + total, mask=changed)


def launch_down(plan: BoundPlan, x: Tensor, down: Tensor, scales: Tensor) -> None:
    """Append adapter_down for every row of the bucket."""
    rows, chunks = (1, 16) if x.shape[0] <= _FEW_ROWS else (16, 2)
    plan.add_gpu(
        adapter_down_kernel,
        grid=(down.shape[0] // RANKS, triton.cdiv(x.shape[0], rows)),
        num_adapters=scales.shape[1],
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=False,
        RANKS=RANKS,
        ROWS=rows,
        CHUNKS=chunks,
    )


def launch_up(
    plan: BoundPlan, products: Tensor, up: Tensor, owners: Tensor, scales: Tensor
) -> None:
    """Append adapter_up for every row of the bucket."""
    rows = 1 if products.shape[0] <= _FEW_ROWS else 16
    plan.add_gpu(
        adapter_up_kernel,
        grid=(up.shape[1] // OUTPUTS, triton.cdiv(products.shape[0], rows)),
        num_tiles=owners.shape[0],
        num_adapters=scales.shape[1],
        num_warps=2 if rows == 1 else 4,
        num_stages=1,
        enable_fp_fusion=False,
        RANKS=RANKS,
        ROWS=rows,
        OUTPUTS=OUTPUTS,
    )
