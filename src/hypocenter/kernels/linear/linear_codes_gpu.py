"""Triton kernel of `linear` for weights of block types and few rows: codes, in integers.

Sums within a group are integers and so exact. Products of groups are added in f32: unit u (64
columns) belongs to chain u % 16, a chain adds its groups in order, and the chains are added in
order. The kernels for more rows (`linear_codes_many_gpu.py`) keep to that too, so that results are
equal in every bit.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow, store_outputs
from hypocenter.kernels.weights.gpu_layout import CODE_LANES

_LANES = tl.constexpr(CODE_LANES)


@triton.jit
def _dot4(a, b, c, ON_NVIDIA: tl.constexpr):
    """c + the products of four signed bytes each."""
    if ON_NVIDIA:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [a, b, c],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        total = c + ((a << 24) >> 24) * ((b << 24) >> 24) + ((a << 16) >> 24) * ((b << 16) >> 24)
        return total + ((a << 8) >> 24) * ((b << 8) >> 24) + (a >> 24) * (b >> 24)


@triton.jit
def _add_group(acc, products, xsum, scale, minimum, x_scale, ZERO: tl.constexpr, HAS: tl.constexpr):
    """One group's share; the multiplications feed fused ones, so nothing is left to a compiler."""
    if ZERO > 0:
        products -= ZERO * xsum
    acc = tl.fma(products.to(tl.float32), scale * x_scale, acc)
    if HAS:
        acc = tl.fma(xsum.to(tl.float32), minimum * x_scale, acc)
    return acc


@triton.jit
def _low_half(word):
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def both_scales(pointer, mask, SCALE_BITS: tl.constexpr):
    """Two neighbours as f32 by one load: loads are what these kernels wait for."""
    if SCALE_BITS == 16:
        pair = tl.load(pointer.to(tl.pointer_type(tl.int32), bitcast=True), mask=mask, other=0)
        return _low_half(pair), _low_half(pair >> 16)
    else:
        pair = tl.load(pointer.to(tl.pointer_type(tl.int64), bitcast=True), mask=mask, other=0)
        low = (pair & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        return low, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def fold_chains(part, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """[ROWS, 16 chains, OUTPUTS] to [ROWS, OUTPUTS]: the chains in order."""
    part = tl.permute(part, (0, 2, 1))
    even, odd = tl.split(tl.reshape(part, (ROWS, OUTPUTS, 8, 2)))
    a0, a2 = tl.split(tl.reshape(even, (ROWS, OUTPUTS, 4, 2)))
    a1, a3 = tl.split(tl.reshape(odd, (ROWS, OUTPUTS, 4, 2)))
    b0, b4 = tl.split(tl.reshape(a0, (ROWS, OUTPUTS, 2, 2)))
    b1, b5 = tl.split(tl.reshape(a1, (ROWS, OUTPUTS, 2, 2)))
    b2, b6 = tl.split(tl.reshape(a2, (ROWS, OUTPUTS, 2, 2)))
    b3, b7 = tl.split(tl.reshape(a3, (ROWS, OUTPUTS, 2, 2)))
    c0, c8 = tl.split(b0)
    c1, c9 = tl.split(b1)
    c2, c10 = tl.split(b2)
    c3, c11 = tl.split(b3)
    c4, c12 = tl.split(b4)
    c5, c13 = tl.split(b5)
    c6, c14 = tl.split(b6)
    c7, c15 = tl.split(b7)
    low = ((((((c0 + c1) + c2) + c3) + c4) + c5) + c6) + c7
    return (((((((low + c8) + c9) + c10) + c11) + c12) + c13) + c14) + c15


@triton.jit
def _operands(w, x, PER_WORD: tl.constexpr):
    """The words of a unit's weights, then those of x: four for each, by columns."""
    if PER_WORD == 8:
        packed0, packed1 = tl.load(w), tl.load(w + 4 * _LANES)
        w0, w1 = packed0 & 0x0F0F0F0F, packed1 & 0x0F0F0F0F
        w2, w3 = (packed0 >> 4) & 0x0F0F0F0F, (packed1 >> 4) & 0x0F0F0F0F
    else:
        w0, w1 = tl.load(w), tl.load(w + 4 * _LANES)
        w2, w3 = tl.load(w + 8 * _LANES), tl.load(w + 12 * _LANES)
    x0, x1, x2, x3 = tl.load(x), tl.load(x + 64), tl.load(x + 128), tl.load(x + 192)
    return w0, w1, w2, w3, x0, x1, x2, x3


@triton.jit
def _add_unit(
    acc, w0, w1, w2, w3, x0, x1, x2, x3, x_scales, sums_at, scales, minima, inside,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, SCALE_BITS: tl.constexpr,
    ON_NVIDIA: tl.constexpr,
):  # fmt: skip
    """A unit's groups, in the order of their columns."""
    x_scale0, x_scale1 = both_scales(x_scales, inside, 32)
    if GROUP == 32:
        scale0, scale1 = both_scales(scales, inside, SCALE_BITS)
        low0, low1 = scale0, scale1
        if HAS_MINIMA:
            low0, low1 = both_scales(minima, inside, SCALE_BITS)
    for half in tl.static_range(2):
        x_scale = x_scale0 if half == 0 else x_scale1
        sums = tl.load(sums_at + half)
        sum0, sum1 = (sums << 16) >> 16, sums >> 16
        a0, a1 = (w0, w1) if half == 0 else (w2, w3)
        b0, b1 = (x0, x1) if half == 0 else (x2, x3)
        products = _dot4(a0, b0, 0, ON_NVIDIA)
        if GROUP == 32:
            products = tl.sum(_dot4(a1, b1, products, ON_NVIDIA), axis=3)
            scale, low = (scale0, low0) if half == 0 else (scale1, low1)
            acc = _add_group(acc, products, sum0 + sum1, scale, low, x_scale, ZERO, HAS_MINIMA)
        else:
            others = tl.sum(_dot4(a1, b1, 0, ON_NVIDIA), axis=3)
            products = tl.sum(products, axis=3)
            at = 2 * half
            scale0, scale1 = both_scales(scales + at, inside, SCALE_BITS)
            low0, low1 = scale0, scale1
            if HAS_MINIMA:
                low0, low1 = both_scales(minima + at, inside, SCALE_BITS)
            acc = _add_group(acc, products, sum0, scale0, low0, x_scale, ZERO, HAS_MINIMA)
            acc = _add_group(acc, others, sum1, scale1, low1, x_scale, ZERO, HAS_MINIMA)
    return acc


@triton.jit
def few_outputs(
    codes_ptr, x_scales_ptr, sums_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr,
    out_stride, tile, first, num_live, num_units, x_pitch, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ON_NVIDIA: tl.constexpr, SCALE_BITS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one weight for ROWS rows."""
    UNIT_WORDS: tl.constexpr = 64 * _LANES // PER_WORD
    PER_UNIT: tl.constexpr = 64 // GROUP
    rows = first + tl.arange(0, ROWS)
    # A single row is read whether it is live or not, and so nobody waits to hear it.
    at_row = as_offset(tl.minimum(rows, num_live - 1) if ROWS > 1 else rows, WIDE)
    # A warp is outputs first, then chains: what it reads of x is the same for most of its lanes.
    chain, lane, word = tl.arange(0, 16), tl.arange(0, OUTPUTS), tl.arange(0, 4)
    plane = (chain * 0)[:, None] + (lane * 0)[None, :]
    outputs = tile * OUTPUTS + lane
    row_plane = as_offset(outputs // _LANES, WIDE) * num_units
    words = (
        words_ptr
        + (plane + (row_plane * UNIT_WORDS + outputs % _LANES * 4)[None, :])[None, :, :, None]
        + word[None, None, None, :]
    )
    codes = (
        codes_ptr
        + (at_row * x_pitch)[:, None, None, None]
        + (plane[:, :, None] + word[None, None, :])[None]
    )
    scale_at = (plane + ((row_plane * _LANES + outputs % _LANES) * PER_UNIT)[None, :])[None]
    group_at = (at_row * (x_pitch // 8))[:, None, None] + plane[None]
    acc = tl.zeros([ROWS, 16, OUTPUTS], tl.float32)
    for start in tl.range(0, num_units, 16, loop_unroll_factor=UNROLL):
        unit = start + chain
        inside = (unit < num_units)[None, :, None]
        unit = tl.minimum(unit, num_units - 1)
        w = words + (unit * UNIT_WORDS)[None, :, None, None]
        x = codes + (start * 16 + unit % 16 * 4)[None, :, None, None]
        s = scale_at + (unit * (_LANES * PER_UNIT))[None, :, None]
        g = group_at + (unit * 2)[None, :, None]
        w0, w1, w2, w3, x0, x1, x2, x3 = _operands(w, x, PER_WORD)
        acc = _add_unit(
            acc,
            w0,
            w1,
            w2,
            w3,
            x0,
            x1,
            x2,
            x3,
            x_scales_ptr + g,
            sums_ptr + g,
            scales_ptr + s,
            minima_ptr + s,
            inside,
            GROUP,
            ZERO,
            HAS_MINIMA,
            SCALE_BITS,
            ON_NVIDIA,
        )
    if ROWS == 4 or (GROUP == 16 and PER_WORD == 4):
        # From ranges of their own: ptxas spills for the first ones in these forms.
        rows = first - ROWS + tl.arange(ROWS, 2 * ROWS)
        outputs = (tile - 1) * OUTPUTS + tl.arange(OUTPUTS, 2 * OUTPUTS)
    store_outputs(
        out_ptr,
        rows[:, None],
        outputs[None, :],
        out_stride,
        fold_chains(acc, ROWS, OUTPUTS),
        bias_ptr,
        (rows < num_live)[:, None],
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
    )


@triton.jit(do_not_specialize=["count", "num_tiles", "num_tiles_2"])
def linear_codes_few_kernel(
    codes_ptr, x_scales_ptr, sums_ptr, counts_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr,
    out_ptr, out_stride, words_2_ptr, scales_2_ptr, minima_2_ptr, bias_2_ptr, out_2_ptr,
    out_2_stride, words_3_ptr, scales_3_ptr, minima_3_ptr, bias_3_ptr, out_3_ptr, out_3_stride,
    num_tiles, num_tiles_2, count, num_units, x_pitch, NUM_WEIGHTS: tl.constexpr,
    PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, ON_NVIDIA: tl.constexpr,
    SCALE_BITS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    tile, first = tl.program_id(0), tl.program_id(1) * ROWS
    num_live = tl.load(counts_ptr + count)
    if ROWS > 1:
        if first >= num_live:
            return
    # Each weight has code of its own: guarded, an access is held against that weight alone.
    if NUM_WEIGHTS == 3:
        if tile >= num_tiles + num_tiles_2:
            few_outputs(
                codes_ptr,
                x_scales_ptr,
                sums_ptr,
                words_3_ptr,
                scales_3_ptr,
                minima_3_ptr,
                bias_3_ptr,
                out_3_ptr,
                out_3_stride,
                tile - num_tiles - num_tiles_2,
                first,
                num_live,
                num_units,
                x_pitch,
                PER_WORD,
                GROUP,
                ZERO,
                HAS_MINIMA,
                HAS_BIAS,
                ACCUMULATE,
                ON_NVIDIA,
                SCALE_BITS,
                WIDE,
                ROWS,
                OUTPUTS,
                UNROLL,
            )
            return
    if NUM_WEIGHTS > 1:
        if tile >= num_tiles:
            few_outputs(
                codes_ptr,
                x_scales_ptr,
                sums_ptr,
                words_2_ptr,
                scales_2_ptr,
                minima_2_ptr,
                bias_2_ptr,
                out_2_ptr,
                out_2_stride,
                tile - num_tiles,
                first,
                num_live,
                num_units,
                x_pitch,
                PER_WORD,
                GROUP,
                ZERO,
                HAS_MINIMA,
                HAS_BIAS,
                ACCUMULATE,
                ON_NVIDIA,
                SCALE_BITS,
                WIDE,
                ROWS,
                OUTPUTS,
                UNROLL,
            )
            return
    few_outputs(
        codes_ptr,
        x_scales_ptr,
        sums_ptr,
        words_ptr,
        scales_ptr,
        minima_ptr,
        bias_ptr,
        out_ptr,
        out_stride,
        tile,
        first,
        num_live,
        num_units,
        x_pitch,
        PER_WORD,
        GROUP,
        ZERO,
        HAS_MINIMA,
        HAS_BIAS,
        ACCUMULATE,
        ON_NVIDIA,
        SCALE_BITS,
        WIDE,
        ROWS,
        OUTPUTS,
        UNROLL,
    )
