"""Triton kernels of `measure`: one program is a part of a tensor, and then a whole tensor's parts.

Digests are as on the CPU to the bit. Sums are of f64, in an order that the compiler chooses.
"""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device import digests
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow

_FIRST, _SECOND = tl.constexpr(digests.FIRST), tl.constexpr(digests.SECOND)
_SHIFT, _SHIFT_AGAIN, _SHIFT_LAST = (tl.constexpr(shift) for shift in digests.SHIFTS)
_SKETCHES, _SKETCH = tl.constexpr(digests.NUM_SKETCHES), tl.constexpr(digests.SKETCH)
_WORDS = tl.constexpr(digests.NUM_WORDS)
_LOW, _HIGH = tl.constexpr(digests.LOW), tl.constexpr(digests.HIGH)
_TOTAL, _SQUARES = tl.constexpr(digests.TOTAL), tl.constexpr(digests.SQUARES)
_NUM_NAN, _NUM_INF = tl.constexpr(digests.NUM_NAN), tl.constexpr(digests.NUM_INF)
_DIGEST = tl.constexpr(digests.DIGEST)
#: Numbers of which no other code is made.
_NUMBERS = ["count", "parts_each", "width", "width1", "width2", "width3", "width4"]
#: Parts that a program joins at a time.
_PARTS = 32


@triton.jit
def mix_of(place):
    """The mix of places u32, as `device/digests.py` says."""
    mix = place
    mix = mix ^ (mix >> _SHIFT)
    mix = mix * _FIRST
    mix = mix ^ (mix >> _SHIFT_AGAIN)
    mix = mix * _SECOND
    return mix ^ (mix >> _SHIFT_LAST)


@triton.jit
def _as_bits(number):
    return number.to(tl.int64, bitcast=True)


@triton.jit
def _measure_part(
    x_ptr, parts_ptr, num_rows, width, stride, parts_each, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """The figures of this program's units of a tensor, to where parts_ptr points."""
    ROWS: tl.constexpr = BLOCK // _SKETCHES
    num_tiles = (width + BLOCK - 1) // BLOCK
    low = tl.full([ROWS, _SKETCHES], float("inf"), tl.float32)
    high = tl.full([ROWS, _SKETCHES], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, _SKETCHES], tl.float64)
    squares = tl.zeros([ROWS, _SKETCHES], tl.float64)
    sketch = tl.zeros([ROWS, _SKETCHES], tl.float64)
    digest = tl.zeros([ROWS, _SKETCHES], tl.int64)
    num_nan = tl.zeros([ROWS, _SKETCHES], tl.int32)
    num_inf = tl.zeros([ROWS, _SKETCHES], tl.int32)
    within = tl.arange(0, ROWS)[:, None] * _SKETCHES + tl.arange(0, _SKETCHES)[None, :]
    for unit in range(tl.program_id(0), num_rows * num_tiles, parts_each):
        row, column = unit // num_tiles, unit % num_tiles * BLOCK + within
        live = column < width
        x = tl.load(x_ptr + as_offset(row, WIDE) * stride + column, mask=live, other=0.0)
        bits = x.to(tl.uint32, bitcast=True)
        mix = mix_of((row * width + column).to(tl.uint32))
        # What is not live has no bits.
        digest += bits.to(tl.int64) * (mix | 1).to(tl.int64)
        is_nan, is_finite = x != x, (bits & 0x7F800000) != 0x7F800000
        num_nan += is_nan.to(tl.int32)
        num_inf += (1 - is_finite.to(tl.int32)) - is_nan.to(tl.int32)
        counted = live & is_finite
        low = tl.minimum(low, tl.where(counted, x, float("inf")))
        high = tl.maximum(high, tl.where(counted, x, float("-inf")))
        wide = tl.where(is_finite, x, 0.0).to(tl.float64)
        total += wide
        squares += wide * wide
        sketch += tl.where((mix >> 31) != 0, -wide, wide)
    tl.store(parts_ptr + _LOW, _as_bits(tl.min(tl.min(low, 0), 0).to(tl.float64)))
    tl.store(parts_ptr + _HIGH, _as_bits(tl.max(tl.max(high, 0), 0).to(tl.float64)))
    tl.store(parts_ptr + _TOTAL, _as_bits(tl.sum(tl.sum(total, 0), 0)))
    tl.store(parts_ptr + _SQUARES, _as_bits(tl.sum(tl.sum(squares, 0), 0)))
    tl.store(parts_ptr + _NUM_NAN, tl.sum(tl.sum(num_nan, 0), 0).to(tl.int64))
    tl.store(parts_ptr + _NUM_INF, tl.sum(tl.sum(num_inf, 0), 0).to(tl.int64))
    tl.store(parts_ptr + _DIGEST, tl.sum(tl.sum(digest, 0), 0))
    tl.store(parts_ptr + _DIGEST + 1, tl.zeros([], tl.int64))
    tl.store(parts_ptr + _SKETCH + tl.arange(0, _SKETCHES), _as_bits(tl.sum(sketch, 0)))


@triton.jit(do_not_specialize=_NUMBERS)
def measure_kernel(
    x_ptr,
    x1_ptr,
    x2_ptr,
    x3_ptr,
    x4_ptr,
    counts_ptr,
    parts_ptr,
    count,
    parts_each,
    width,
    width1,
    width2,
    width3,
    width4,
    x_pitch,
    x1_pitch,
    x2_pitch,
    x3_pitch,
    x4_pitch,
    HAS_X1: tl.constexpr,
    HAS_X2: tl.constexpr,
    HAS_X3: tl.constexpr,
    HAS_X4: tl.constexpr,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: parts[i * n + p] = the figures of units p, p + n, ... of tensor i, each BLOCK
    columns of one of its live rows, with n = parts_each, the programs of a tensor.
    Shapes: x, x1, x2, x3 and x4 f32 [num_rows, >= width] of each; counts i32 [2]; parts i64
    [num_tensors * parts_each, NUM_WORDS].
    """
    follow(OVERLAPS)
    num_rows, tensor = tl.load(counts_ptr + count), tl.program_id(1)
    to = parts_ptr + (tensor * parts_each + tl.program_id(0)) * _WORDS
    if tensor == 0:
        _measure_part(x_ptr, to, num_rows, width, x_pitch, parts_each, WIDE, BLOCK)
    if HAS_X1:
        if tensor == 1:
            _measure_part(x1_ptr, to, num_rows, width1, x1_pitch, parts_each, WIDE, BLOCK)
    if HAS_X2:
        if tensor == 2:
            _measure_part(x2_ptr, to, num_rows, width2, x2_pitch, parts_each, WIDE, BLOCK)
    if HAS_X3:
        if tensor == 3:
            _measure_part(x3_ptr, to, num_rows, width3, x3_pitch, parts_each, WIDE, BLOCK)
    if HAS_X4:
        if tensor == 4:
            _measure_part(x4_ptr, to, num_rows, width4, x4_pitch, parts_each, WIDE, BLOCK)


@triton.jit
def join_figures_kernel(
    parts_ptr,
    firsts_ptr,
    figures_ptr,
    OVERLAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: figures[i] = the sums, and the widest range, of parts[firsts[i] : firsts[i + 1]].
    Shapes: parts i64 [num_parts, NUM_WORDS]; firsts i32 [num_tensors + 1]; figures i64
    [num_tensors, NUM_WORDS].
    """
    follow(OVERLAPS)
    tensor, word = tl.program_id(0), tl.arange(0, _WORDS)
    first, last = tl.load(firsts_ptr + tensor), tl.load(firsts_ptr + tensor + 1)
    is_number = (word <= _SQUARES) | (word >= _SKETCH)
    low = tl.full([BLOCK, _WORDS], float("inf"), tl.float64)
    high = tl.full([BLOCK, _WORDS], float("-inf"), tl.float64)
    total, count = tl.zeros([BLOCK, _WORDS], tl.float64), tl.zeros([BLOCK, _WORDS], tl.int64)
    for start in range(first, last, BLOCK):
        part = start + tl.arange(0, BLOCK)
        live = (part < last)[:, None] & (word < _WORDS)[None, :]
        at = part[:, None] * _WORDS + word[None, :]
        bits = tl.load(parts_ptr + at, mask=live, other=0)
        # Words that are no numbers of f64 count as 0 there.
        number = tl.where(is_number[None, :], bits, 0).to(tl.float64, bitcast=True)
        low = tl.minimum(low, tl.where(live, number, float("inf")))
        high = tl.maximum(high, tl.where(live, number, float("-inf")))
        # A part of no element has an infinite range, which nothing sums.
        is_sum = is_number & (word != _LOW) & (word != _HIGH)
        total += tl.where(is_sum[None, :], number, 0.0)
        count += tl.where(is_number[None, :], 0, bits)
    found = tl.where(is_number, _as_bits(tl.sum(total, 0)), tl.sum(count, 0))
    found = tl.where(word == _LOW, _as_bits(tl.min(low, 0)), found)
    found = tl.where(word == _HIGH, _as_bits(tl.max(high, 0)), found)
    tl.store(figures_ptr + tensor * _WORDS + word, found)


def launch(
    plan: BoundPlan,
    x: Tensor,
    x1: Tensor | None,
    x2: Tensor | None,
    x3: Tensor | None,
    x4: Tensor | None,
    parts_each: int,
) -> None:
    """Append measure: a program for each part of each tensor."""
    others = x1, x2, x3, x4
    given = [x if other is None else other for other in others]
    plan.add_gpu(
        measure_kernel,
        grid=(parts_each, 1 + sum(other is not None for other in others)),
        # With fewer, sm_120 spills.
        num_warps=8,
        x_pitch=x.strides[0],
        # Those that are not there are never read.
        **{f"x{i}_ptr": other for i, other in enumerate(given, 1)},
        **{f"x{i}_pitch": other.strides[0] for i, other in enumerate(given, 1)},
        BLOCK=digests.BLOCK,
    )


def launch_join(plan: BoundPlan, figures: Tensor) -> None:
    """Append join_figures: a program for each tensor."""
    plan.add_gpu(join_figures_kernel, grid=(figures.shape[0],), BLOCK=_PARTS)
