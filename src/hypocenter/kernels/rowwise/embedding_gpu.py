"""Triton kernels of `embedding`, over the packed layouts of `gpu_layout.py`."""

from __future__ import annotations

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow
from hypocenter.kernels.weights.gpu_layout import CODE_LANES, UNITS
from hypocenter.kernels.weights.packing import Packed

_BLOCK = 256
_ROWS = tl.constexpr(CODE_LANES)


@triton.jit
def lookup_float_kernel(
    token_ids_ptr, counts_ptr, weights_ptr, out_ptr, num_columns, out_stride,
    IS_BF16: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: out[i] = weights[token_ids[i]].
    Shapes: token_ids i32 [num_tokens]; counts i32 [2]; weights f32, f16 or bf16 bits
    [vocab_size, num_columns], packed as in `gpu_layout.py`; out f32 [num_tokens, >=
    num_columns].
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    token = as_offset(tl.load(token_ids_ptr + row), WIDE)
    num_units = (num_columns + 63) // 64
    at = ((token // 16 * num_units + column // 64) * 16 + token % 16) * 64 + column % 64
    value = tl.load(weights_ptr + at, mask=inside, other=0)
    if IS_BF16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    tl.store(
        out_ptr + as_offset(row, WIDE) * out_stride + column, value.to(tl.float32), mask=inside
    )


@triton.jit
def lookup_codes_kernel(
    token_ids_ptr, counts_ptr, words_ptr, scales_ptr, minima_ptr, out_ptr, zero, factor,
    num_columns, out_stride, PER_WORD: tl.constexpr, GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: out[i] = factor (scale code + minimum) of row token_ids[i], where minimum = -zero
    scale if a type has none.
    Shapes: token_ids i32 [num_tokens]; counts i32 [2]; words i32, scales and minima f16,
    packed as in `gpu_layout.py`; out f32 [num_tokens, >= num_columns].
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    token = as_offset(tl.load(token_ids_ptr + row), WIDE)
    COLUMNS: tl.constexpr = 16 * PER_WORD
    num_units = (num_columns + COLUMNS - 1) // COLUMNS
    row_at = (token // _ROWS * num_units + column // COLUMNS) * _ROWS + token % _ROWS
    # Of 16 columns a lane has two, and the two that lie eight further on.
    chunk, lane, odd = column % COLUMNS // 16, column % 8 // 2, column % 2
    pair = column % 16 // 8
    if PER_WORD == 4:
        index, shift = chunk, 8 * (pair * 2 + odd)
    else:
        index, shift = chunk // 2, 4 * (odd * 4 + chunk % 2 * 2 + pair)
    word = tl.load(words_ptr + row_at * 16 + lane * 4 + index, mask=inside, other=0)
    at = row_at * (COLUMNS // GROUP) + column % COLUMNS // GROUP
    scale = tl.load(scales_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_MINIMA:
        low = tl.load(minima_ptr + at, mask=inside, other=0.0).to(tl.float32)
    else:
        low = -zero * scale
    if PER_WORD == 4:
        code = (word << (24 - shift)) >> 24
    else:
        code = (word >> shift) & 15
    tl.store(
        out_ptr + as_offset(row, WIDE) * out_stride + column,
        (code.to(tl.float32) * scale + low) * factor,
        mask=inside,
    )


@triton.jit(do_not_specialize=["count"])
def gather_kernel(
    x_ptr,
    rows_ptr,
    counts_ptr,
    out_ptr,
    count,
    width,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: out[i] = x[rows[i]], for i < counts[count].
    Shapes: x f32 [num_rows, width]; rows i32 [>= num_taken]; counts i32 [2]; out f32 [num_taken,
    width].
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = as_offset(tl.load(rows_ptr + row), WIDE)
    value = tl.load(x_ptr + source * width + column, mask=inside, other=0.0)
    tl.store(out_ptr + as_offset(row, WIDE) * width + column, value, mask=inside)


@triton.jit
def add_rows_kernel(
    x_ptr,
    table_ptr,
    rows_ptr,
    counts_ptr,
    width,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: x[i] += table[rows[i]], for i < counts[0].
    Shapes: x f32 [num_tokens, width]; table f32 [num_rows, width]; rows i32 [num_tokens]; counts
    i32 [2].
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = as_offset(tl.load(rows_ptr + row), WIDE)
    at = as_offset(row, WIDE) * width + column
    added = tl.load(table_ptr + source * width + column, mask=inside, other=0.0)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=inside, other=0.0) + added, mask=inside)


@triton.jit(do_not_specialize=["count"])
def keep_rows_kernel(
    x_ptr,
    rows_ptr,
    counts_ptr,
    table_ptr,
    count,
    width,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: table[rows[i]] = x[i], for i < counts[count].
    Shapes: x f32 [num_rows, width]; rows i32 [>= num_rows]; counts i32 [2]; table f32 [num_kept,
    width].
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    target = as_offset(tl.load(rows_ptr + row), WIDE)
    value = tl.load(x_ptr + as_offset(row, WIDE) * width + column, mask=inside, other=0.0)
    tl.store(table_ptr + target * width + column, value, mask=inside)


@triton.jit
def narrow_kernel(
    x_ptr,
    counts_ptr,
    out_ptr,
    x_stride,
    width,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: out[i] = x[i, :width], for i < counts[1].
    Shapes: x f32 [num_logit_rows, >= width]; counts i32 [2]; out f32 [num_logit_rows, width].
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + 1):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x_ptr + as_offset(row, WIDE) * x_stride + column, mask=inside, other=0.0)
    tl.store(out_ptr + as_offset(row, WIDE) * width + column, value, mask=inside)


def launch_lookup_float(plan: BoundPlan, table: Tensor, out: Tensor, num_columns: int) -> None:
    """Append lookup_float: one program for 256 columns of each token of the bucket."""
    packed: Packed = table.data
    plan.add_gpu(
        lookup_float_kernel,
        grid=(out.shape[0], triton.cdiv(num_columns, _BLOCK)),
        weights_ptr=packed.parts[0],
        IS_BF16=table.dtype is DType.BF16,
        BLOCK=_BLOCK,
    )


def launch_lookup_codes(plan: BoundPlan, table: Tensor, out: Tensor, num_columns: int) -> None:
    """Append lookup_codes: one program for 256 columns of each token of the bucket."""
    packed: Packed = table.data
    words, scales, minima, zero, factor = packed.parts
    layout = UNITS[packed.dtype]
    plan.add_gpu(
        lookup_codes_kernel,
        grid=(out.shape[0], triton.cdiv(num_columns, _BLOCK)),
        words_ptr=words,
        scales_ptr=scales,
        minima_ptr=minima,
        zero=float(zero),
        factor=float(factor),
        PER_WORD=layout.codes_per_word,
        GROUP=layout.group,
        HAS_MINIMA=layout.has_minima,
        BLOCK=_BLOCK,
    )


def launch_gather(plan: BoundPlan, out: Tensor) -> None:
    """Append gather: one program for 256 columns of each output row."""
    num_rows, width = out.shape
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    plan.add_gpu(gather_kernel, grid=grid, width=width, BLOCK=_BLOCK)


def launch_add_rows(plan: BoundPlan, x: Tensor) -> None:
    """Append add_rows: one program for 256 columns of each token of the bucket."""
    num_rows, width = x.shape
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    plan.add_gpu(add_rows_kernel, grid=grid, width=width, BLOCK=_BLOCK)


def launch_keep_rows(plan: BoundPlan, x: Tensor) -> None:
    """Append keep_rows: one program for 256 columns of each row."""
    num_rows, width = x.shape
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    plan.add_gpu(keep_rows_kernel, grid=grid, width=width, BLOCK=_BLOCK)


def launch_narrow(plan: BoundPlan, out: Tensor) -> None:
    """Append narrow: one program for 256 columns of each row."""
    num_rows, width = out.shape
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    plan.add_gpu(narrow_kernel, grid=grid, width=width, BLOCK=_BLOCK)
