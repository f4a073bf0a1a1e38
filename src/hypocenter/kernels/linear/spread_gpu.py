"""Triton kernel of `spread`: codes times their scales in f16, exactly, for the matrix units.

A scale has four bits that count, and so code times scale has eleven, which is what f16 holds. A
power of two for each row brings its largest number near the end of f16. Only a group whose numbers
are 2**29 times smaller loses bits of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.shared_gpu import as_offset, follow

_ROWS, _GROUPS = 4, 32


@triton.jit
def _pair(even, odd):
    """Two f16 in a word."""
    low = even.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (odd.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _pairs(four, scale):
    """The codes of words times scale: the first two, and the last two."""
    a = (((four << 24) >> 24).to(tl.float32) * scale).to(tl.float16)
    b = (((four << 16) >> 24).to(tl.float32) * scale).to(tl.float16)
    c = (((four << 8) >> 24).to(tl.float32) * scale).to(tl.float16)
    d = ((four >> 24).to(tl.float32) * scale).to(tl.float16)
    return _pair(a, b), _pair(c, d)


@triton.jit
def _store_sums(to, pair, scale, mask):
    """Of the first 16, the last 16 and all columns of each group."""
    first, last = ((pair << 16) >> 16).to(tl.float32), (pair >> 16).to(tl.float32)
    tl.store(to, first * scale, mask=mask)
    tl.store(to + 64, last * scale, mask=mask)
    tl.store(to + 128, (first + last) * scale, mask=mask)


@triton.jit
def spread_kernel(
    codes_ptr, scales_ptr, sums_ptr, counts_ptr, spread_ptr, row_scales_ptr, row_sums_ptr, count,
    num_groups, pitch, spread_stride, sums_stride, HAS_SUMS: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    first = tl.program_id(0) * ROWS
    num_live = tl.load(counts_ptr + count)
    if first >= num_live:
        return
    rows, group = first + tl.arange(0, ROWS), tl.arange(0, GROUPS)
    live = (rows < num_live)[:, None]
    at_row = as_offset(rows, WIDE)
    scales = scales_ptr + (at_row * pitch)[:, None] + group[None, :]
    largest = tl.zeros([ROWS, GROUPS], tl.float32)
    for start in range(0, num_groups, GROUPS):
        mask = live & (start + group < num_groups)[None, :]
        scale = tl.load(scales + start, mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.where(scale == scale, scale, 0.0))
    # The power of two that brings the largest scale to 256 .. 512, and its inverse.
    exponent = tl.max(largest, axis=1).to(tl.int32, bitcast=True) >> 23
    field = tl.minimum(tl.maximum(262 - exponent, 1), 253)
    up = (field << 23).to(tl.float32, bitcast=True)
    down = ((254 - field) << 23).to(tl.float32, bitcast=True)
    tl.store(row_scales_ptr + at_row, down, mask=rows < num_live)
    chunk, word = tl.arange(0, 2), tl.arange(0, 4)
    place = (chunk * 4)[:, None] + word[None, :]
    codes = codes_ptr + (at_row * pitch * 8)[:, None, None, None] + place[None, None]
    # Of 16 columns the first pairs of all words come first, and then the second pairs.
    words = spread_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    into = ((chunk * 8)[:, None] + word[None, :])[None, None]
    into = words + (at_row * (spread_stride // 2))[:, None, None, None] + into
    sums_at = row_sums_ptr + (at_row // 64 * sums_stride + at_row % 64)[:, None]
    for start in range(0, num_groups, GROUPS):
        mask = live & (start + group < num_groups)[None, :]
        scale = tl.load(scales + start, mask=mask, other=0.0) * up[:, None]
        at = ((start + group) * 8)[None, :, None, None]
        mask4, scale4 = mask[:, :, None, None], scale[:, :, None, None]
        four = tl.load(codes + at, mask=mask4, other=0)
        first_pair, last_pair = _pairs(four, scale4)
        tl.store(into + 2 * at, first_pair, mask=mask4)
        tl.store(into + (2 * at + 4), last_pair, mask=mask4)
        if HAS_SUMS:
            pair = sums_ptr + (at_row * pitch)[:, None] + (start + group)[None, :]
            to = sums_at + ((start + group) * 192)[None, :]
            _store_sums(to, tl.load(pair, mask=mask, other=0), scale, mask)


def add(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append spread for every row of the bucket."""
    codes, spread, row_sums = facts["codes"], facts["spread"], facts.get("row_sums")
    pitch = codes.shape[1] // 8
    plan.add_gpu(
        spread_kernel,
        *(codes, facts["scales"], facts["sums"], facts["counts"], spread, facts["row_scales"]),
        # Without sums the pointer is never read; Triton wants one all the same.
        *(facts["row_scales"] if row_sums is None else row_sums, facts["count"]),
        *(-(-facts["width"] // 64) * 2, pitch, spread.shape[1]),
        0 if row_sums is None else row_sums.strides[0],
        grid=(triton.cdiv(codes.shape[0], _ROWS),),
        contract=contract,
        facts=facts,
        HAS_SUMS=row_sums is not None,
        ROWS=_ROWS,
        GROUPS=_GROUPS,
    )
