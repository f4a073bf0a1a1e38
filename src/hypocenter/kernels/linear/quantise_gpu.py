"""Triton kernels of `quantise`: one program makes codes of some groups, or rounds one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.linear.operands import FEW_ROWS
from hypocenter.kernels.shared_gpu import as_offset, follow
from hypocenter.tensor import DType

#: Groups that a program makes where rows are many, and where they are few.
_GROUPS, _FEW_GROUPS = 64, 16
#: Columns of a row that one program takes at once.
_MAX_BLOCK = 16384


@triton.jit
def columns_of(group):
    """[groups, 2, 4, 4]: halves of four words of four columns, so that a thread makes a word."""
    half, word, byte = tl.arange(0, 2), tl.arange(0, 4), tl.arange(0, 4)
    return (
        group[:, None, None, None] * 32
        + half[None, :, None, None] * 16
        + word[None, None, :, None] * 4
        + byte[None, None, None, :]
    )


@triton.jit
def store_codes(
    x, row, group, inside, width, codes_ptr, scales_ptr, sums_ptr, num_groups,
    IS_FEW: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Store the codes of x, of the shape of `columns_of(group)`, with scales and sums.

    A row of `width` columns is filled to the end of its last span, and has room for num_groups.
    """
    inside &= group < (width + 1023) // 1024 * 32
    half, word, byte = tl.arange(0, 2), tl.arange(0, 4), tl.arange(0, 4)
    size = tl.abs(x)
    infinity = float("inf")
    finite = size < infinity
    size = tl.where(finite, size, infinity)
    largest = tl.max(tl.max(tl.max(size, axis=3), axis=2), axis=1)
    usable = (largest >= 1e-30) & (largest < infinity)
    safe = tl.where(usable, largest, 1.0)
    bits = (safe * 0.007874015718698502).to(tl.int32, bitcast=True)
    # Four bits that count, up: so code times scale fits the eleven of f16 (`spread_gpu.py`).
    safe = ((bits + 0xFFFFF) & -0x100000).to(tl.float32, bitcast=True)
    inverse = tl.where(usable, tl.div_rn(tl.full([GROUPS], 1.0, tl.float32), safe), 0.0)
    scale = tl.where(usable, safe, 0.0)
    scale = tl.where(largest == infinity, float("nan"), scale)
    value = tl.where(finite, x, 0.0) * inverse[:, None, None, None]
    # Adding 1.5 * 2**23 rounds to the nearest integer, ties to even.
    code = ((value + 12582912.0) - 12582912.0).to(tl.int32)
    # The two sums are small: they share a word.
    total = tl.sum(tl.sum(code, axis=3), axis=2)
    sums = tl.sum(total * tl.where(half == 0, 1, 0)[None, :], axis=1) & 0xFFFF
    sums |= tl.sum(total * half[None, :], axis=1) << 16
    words = tl.sum((code & 0xFF) << (8 * byte)[None, None, None, :], axis=3)
    # Words that a warp reads at once lie together: of a unit, or of one place in all of a span's.
    UNIT: tl.constexpr = 4 if IS_FEW else 16
    QUARTER: tl.constexpr = 64 if IS_FEW else 4
    at = group // 32 * 256 + group % 32 // 2 * UNIT + group % 2 * (2 * QUARTER)
    at = at[:, None, None] + half[None, :, None] * QUARTER + word[None, None, :]
    tl.store(codes_ptr + row * num_groups * 8 + at, words, mask=inside[:, None, None])
    tl.store(scales_ptr + row * num_groups + group, scale, mask=inside)
    tl.store(sums_ptr + row * num_groups + group, sums, mask=inside)


@triton.jit
def quantise_kernel(
    x_ptr, counts_ptr, codes_ptr, scales_ptr, sums_ptr, count, width, x_stride, num_groups,
    IS_ONE: tl.constexpr, IS_FEW: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if not IS_ONE:
        if row >= tl.load(counts_ptr + count):
            return
    row = as_offset(row, WIDE)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = columns_of(group)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0)
    store_codes(
        x,
        row,
        group,
        group >= 0,
        width,
        codes_ptr,
        scales_ptr,
        sums_ptr,
        num_groups,
        IS_FEW,
        GROUPS,
    )


@triton.jit
def round_kernel(
    x_ptr, counts_ptr, rounded_ptr, row_scales_ptr, count, width, x_stride, pitch,
    IS_BF16: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    row = as_offset(row, WIDE)
    step = tl.arange(0, BLOCK)
    if IS_BF16:
        tl.store(row_scales_ptr + row, 1.0)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + step
            x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0)
            largest = tl.maximum(largest, tl.abs(x))
        # The power of two that brings the largest number to 2**14 .. 2**15, and its inverse.
        exponent = tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23
        field = tl.minimum(tl.maximum(268 - exponent, 1), 253)
        up = (field << 23).to(tl.float32, bitcast=True)
        tl.store(row_scales_ptr + row, ((254 - field) << 23).to(tl.float32, bitcast=True))
    stop = (width + 63) // 64 * 64
    for start in range(0, stop, BLOCK):
        column = start + step
        x = tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0)
        if IS_BF16:
            rounded = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
        else:
            rounded = (x * up).to(tl.float16)
        tl.store(rounded_ptr + row * pitch + column, rounded, mask=column < stop)


def codes_form(num_rows: int, width: int) -> tuple[int, dict[str, Any]]:
    """Programs for each row of a kernel that makes codes, and its constants and options."""
    groups = _FEW_GROUPS if num_rows <= FEW_ROWS else _GROUPS
    options = {
        # A single row is made whether it is live or not, and so nobody waits to hear it.
        "IS_ONE": num_rows == 1,
        "IS_FEW": num_rows <= FEW_ROWS,
        "GROUPS": groups,
        # A product and a sum rounded once would not be what the reference rounds twice.
        "enable_fp_fusion": False,
    }
    return triton.cdiv(triton.cdiv(width, 1024) * 32, groups), options


def add_codes(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append quantise for every row of the bucket."""
    x, scales = facts["x"], facts["scales"]
    programs, options = codes_form(x.shape[0], facts["width"])
    plan.add_gpu(
        quantise_kernel,
        *(x, facts["counts"], facts["codes"], scales, facts["sums"], facts["count"]),
        *(facts["width"], x.strides[0], scales.shape[1]),
        grid=(x.shape[0], programs),
        contract=contract,
        facts=facts,
        **options,
    )


def add_rounded(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append round: one program for each row of the bucket."""
    x, rounded = facts["x"], facts["rounded"]
    plan.add_gpu(
        round_kernel,
        *(x, facts["counts"], rounded, facts["row_scales"], facts["count"], facts["width"]),
        *(x.strides[0], rounded.shape[1]),
        grid=(x.shape[0],),
        contract=contract,
        facts=facts,
        IS_BF16=rounded.dtype is not DType.F16,
        BLOCK=min(triton.next_power_of_2(facts["width"]), _MAX_BLOCK),
        num_warps=8,
    )
