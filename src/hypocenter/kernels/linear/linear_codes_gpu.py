"""Triton kernel of `linear` for weights of block types and few rows: f16 by the matrix units.

A weight is code times scale (plus minimum), rounded to f16 once, and x is rounded to f16. Both are
multiplied exactly and added in f32 by the matrix units, 16 columns at a time. The units of columns
lie in eight chains, each a stretch of the row; a chain adds its columns in order, and the chains
are added in order. The kernel for more rows (`linear_codes_many_gpu.py`) keeps to that, so results
are equal in every bit. That the matrix unit adds alike in every instruction is seen on hardware
only (`benchmarks/gpu_ops.py` looks).

On NVIDIA's GPUs each warp has a chain of sixteen outputs, and speaks to its matrix unit itself:
weights go from memory to it through registers alone. Elsewhere chains lie side by side in one
product, of which the parts that belong together count.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.unpack_gpu import (
    HIGH,
    LOW,
    UNIT_WORDS,
    four_bytes,
    nibbles,
    unit_weights,
)
from hypocenter.kernels.shared_gpu import as_offset, follow, store_outputs
from hypocenter.kernels.weights.gpu_layout import CHAINS, CODE_LANES

_LANES = tl.constexpr(CODE_LANES)
_CHAINS = tl.constexpr(CHAINS)


@triton.jit
def _fold(part):
    """[..., 2, 2, 2] of chains to [...]: the chains in order."""
    even, odd = tl.split(part)
    c04, c26 = tl.split(even)
    c15, c37 = tl.split(odd)
    c0, c4 = tl.split(c04)
    c2, c6 = tl.split(c26)
    c1, c5 = tl.split(c15)
    c3, c7 = tl.split(c37)
    return ((((((c0 + c1) + c2) + c3) + c4) + c5) + c6) + c7


@triton.jit
def _side_by_side(
    x_ptr, words_ptr, scales_ptr, minima_ptr, tile, first, num_live, num_units, x_stride,
    PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
    ON_NVIDIA: tl.constexpr, WIDE: tl.constexpr, IS_FRAGMENTS: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[OUTPUTS, ROWS]: all chains' weights times all chains' x, of which like chains count."""
    COLUMNS: tl.constexpr = 16 * PER_WORD
    HALVES: tl.constexpr = 2 if OUTPUTS > 8 else 1  # of sixteen outputs
    NUM: tl.constexpr = _CHAINS * OUTPUTS // 8
    per_chain = (num_units + _CHAINS - 1) // _CHAINS
    eight = tl.arange(0, NUM)
    chain = eight // HALVES % _CHAINS
    row = tile * (OUTPUTS // 8) + eight // (_CHAINS * HALVES) * HALVES + eight % HALVES
    units = as_offset(row, WIDE) * num_units
    column, lane = tl.arange(0, COLUMNS), tl.arange(0, _CHAINS * ROWS)
    if IS_FRAGMENTS:  # the column that lies where this one does in order
        in32 = column % 32
        column += in32 % 16 // 2 % 4 * 8 + in32 // 16 * 4 + in32 % 16 // 8 * 2 + in32 % 2 - in32
    x_row = as_offset(tl.maximum(tl.minimum(first + lane % ROWS, num_live - 1), 0), WIDE)
    x = x_ptr + (x_row * x_stride)[None, :] + column[:, None]
    acc = tl.zeros([NUM * 8, _CHAINS * ROWS], tl.float32)
    for step in tl.range(0, per_chain, num_stages=STAGES):
        unit = chain * per_chain + step
        weights = unit_weights(
            words_ptr,
            scales_ptr,
            minima_ptr,
            units + unit,
            unit < num_units,
            PER_WORD,
            GROUP,
            ZERO,
            HAS_MINIMA,
            ON_NVIDIA,
            NUM,
        )
        x_unit = lane // ROWS * per_chain + step
        values = tl.load(
            x + (x_unit * COLUMNS)[None, :], mask=(x_unit < num_units)[None, :], other=0.0
        )
        acc = tl.dot(weights, values, acc)
    acc = tl.reshape(acc, (NUM // (_CHAINS * HALVES), _CHAINS, HALVES * 8, _CHAINS, ROWS))
    one = tl.arange(0, _CHAINS)
    alike = one[None, :, None, None, None] == one[None, None, None, :, None]
    acc = tl.permute(tl.sum(tl.where(alike, acc, 0.0), axis=3), (0, 2, 3, 1))
    return _fold(tl.reshape(acc, (OUTPUTS, ROWS, 2, 2, 2)))


@triton.jit
def _four(at, mask, IS_EVEN: tl.constexpr, LANES: tl.constexpr):
    """Four neighbours of each lane, by one load."""
    at = at[:, None] + tl.arange(0, 4)[None, :]
    words = tl.load(at) if IS_EVEN else tl.load(at, mask=mask[:, None], other=0)
    even, odd = tl.split(tl.reshape(words, (LANES, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _two(at, mask, IS_EVEN: tl.constexpr):
    at = at[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(at) if IS_EVEN else tl.load(at, mask=mask[:, None], other=0))


@triton.jit
def _lane_scales(at, mask, PER_WORD: tl.constexpr, GROUP: tl.constexpr, IS_EVEN: tl.constexpr,
                 LANES: tl.constexpr):  # fmt: skip
    """Words of scales, a pair each, that a lane's four words take: as many as there are."""
    if PER_WORD == 8 and GROUP == 16:
        return _four(at, mask, IS_EVEN, LANES)
    elif PER_WORD == 8 or GROUP == 16:
        s0, s1 = _two(at, mask, IS_EVEN)
        return s0, s1, s0, s1
    else:
        s0 = tl.load(at) if IS_EVEN else tl.load(at, mask=mask, other=0)
        return s0, s0, s0, s0


@triton.jit
def _lane_unit(
    words, scales, minima, step, own, PER_WORD: tl.constexpr, GROUP: tl.constexpr,
    HAS_MINIMA: tl.constexpr, IS_EVEN: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What a lane has of a unit: four words, their scales and minima."""
    PAIRS: tl.constexpr = _LANES * 8 * PER_WORD // GROUP  # words of scales of a unit
    inside = step < own
    w0, w1, w2, w3 = _four(words + step * UNIT_WORDS, inside, IS_EVEN, LANES)
    s0, s1, s2, s3 = _lane_scales(scales + step * PAIRS, inside, PER_WORD, GROUP, IS_EVEN, LANES)
    m0, m1, m2, m3 = s0, s1, s2, s3
    if HAS_MINIMA:
        m0, m1, m2, m3 = _lane_scales(
            minima + step * PAIRS, inside, PER_WORD, GROUP, IS_EVEN, LANES
        )
    return w0, w1, w2, w3, s0, s1, s2, s3, m0, m1, m2, m3


@triton.jit
def _multiply(a0, a1, a2, a3, b0, b1, d0, d1, d2, d3):
    """d += 16 outputs times 8 rows of x, 16 columns: PTX ISA, "mma.m16n8k16"."""
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, d0, d1, d2, d3],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _add_columns(
    d0, d1, d2, d3, d4, d5, d6, d7, a0, a1, a2, a3, a4, a5, a6, a7, x, x_8, at, inside,
    IS_EVEN: tl.constexpr, IS_BOTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """32 columns: of x those of a lane lie together, four words (`store_halves`)."""
    b0, b1, b2, b3 = _four(x + at, inside, IS_EVEN, LANES)
    d0, d1, d2, d3 = _multiply(a0, a1, a2, a3, b0, b1, d0, d1, d2, d3)
    d0, d1, d2, d3 = _multiply(a4, a5, a6, a7, b2, b3, d0, d1, d2, d3)
    if IS_BOTH:
        b0, b1, b2, b3 = _four(x_8 + at, inside, IS_EVEN, LANES)
        d4, d5, d6, d7 = _multiply(a0, a1, a2, a3, b0, b1, d4, d5, d6, d7)
        d4, d5, d6, d7 = _multiply(a4, a5, a6, a7, b2, b3, d4, d5, d6, d7)
    return d0, d1, d2, d3, d4, d5, d6, d7


@triton.jit
def _lane_numbers(
    w0, w1, w2, w3, s0, s1, s2, s3, m0, m1, m2, m3, INDEX: tl.constexpr, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
):  # fmt: skip
    """The INDEX-th 32 columns of what a lane has of a row's unit: four words of two f16."""
    if PER_WORD == 8:
        w = w0 if INDEX == 0 else (w1 if INDEX == 1 else (w2 if INDEX == 2 else w3))
        if GROUP == 16:
            s = s0 if INDEX == 0 else (s1 if INDEX == 1 else (s2 if INDEX == 2 else s3))
            m = m0 if INDEX == 0 else (m1 if INDEX == 1 else (m2 if INDEX == 2 else m3))
            return nibbles(w, s, m, LOW, HIGH, ZERO, HAS_MINIMA)
        else:
            s, m = s0 if INDEX < 2 else s1, m0 if INDEX < 2 else m1
            if INDEX % 2 == 0:
                return nibbles(w, s, m, LOW, LOW, ZERO, HAS_MINIMA)
            else:
                return nibbles(w, s, m, HIGH, HIGH, ZERO, HAS_MINIMA)
    else:
        first, last = w0 if INDEX == 0 else w2, w1 if INDEX == 0 else w3
        s, m = s0 if INDEX == 0 else s1, m0 if INDEX == 0 else m1
        if GROUP == 16:
            b0, b1 = four_bytes(first, s, m, LOW, HAS_MINIMA)
            b2, b3 = four_bytes(last, s, m, HIGH, HAS_MINIMA)
        elif INDEX == 0:
            b0, b1 = four_bytes(first, s0, m0, LOW, HAS_MINIMA)
            b2, b3 = four_bytes(last, s0, m0, LOW, HAS_MINIMA)
        else:
            b0, b1 = four_bytes(first, s0, m0, HIGH, HAS_MINIMA)
            b2, b3 = four_bytes(last, s0, m0, HIGH, HAS_MINIMA)
        return b0, b1, b2, b3


@triton.jit
def _add_unit(
    d0, d1, d2, d3, d4, d5, d6, d7, w0, w1, w2, w3, s0, s1, s2, s3, m0, m1, m2, m3, v0, v1, v2,
    v3, r0, r1, r2, r3, n0, n1, n2, n3, x, x_8, step, own, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_BOTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A unit of two rows of weights that lie eight rows apart."""
    inside, at = step < own, step * (8 * PER_WORD)
    for index in tl.static_range(PER_WORD // 2):
        a0, a2, a4, a6 = _lane_numbers(
            w0, w1, w2, w3, s0, s1, s2, s3, m0, m1, m2, m3, index, PER_WORD, GROUP, ZERO,
            HAS_MINIMA,
        )  # fmt: skip
        a1, a3, a5, a7 = _lane_numbers(
            v0, v1, v2, v3, r0, r1, r2, r3, n0, n1, n2, n3, index, PER_WORD, GROUP, ZERO,
            HAS_MINIMA,
        )  # fmt: skip
        d0, d1, d2, d3, d4, d5, d6, d7 = _add_columns(
            d0, d1, d2, d3, d4, d5, d6, d7, a0, a1, a2, a3, a4, a5, a6, a7, x, x_8,
            at + 16 * index, inside, IS_EVEN, IS_BOTH, LANES,
        )  # fmt: skip
    return d0, d1, d2, d3, d4, d5, d6, d7


@triton.jit
def _fold_lanes(d0, d1, d2, d3):
    """Of each chain's lanes the sums: [8 outputs, 4, 2 rows of x, 2 times 8 outputs]."""
    found = tl.join(tl.join(d0, d1), tl.join(d2, d3))
    return _fold(tl.permute(tl.reshape(found, (2, 2, 2, 8, 4, 2, 2)), (3, 4, 5, 6, 0, 1, 2)))


@triton.jit
def _by_warps(
    x_ptr, live_ptr, words_ptr, scales_ptr, minima_ptr, tile, first, num_units, x_stride,
    PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, IS_EVEN: tl.constexpr, IS_BOTH: tl.constexpr,
):  # fmt: skip
    """[8 outputs, 4, 2 rows of x, 2 times 8 outputs], that for the next 8 rows of x, and the end
    of the rows."""
    LANES: tl.constexpr = _CHAINS * 32
    PAIRS: tl.constexpr = _LANES * 8 * PER_WORD // GROUP
    per_chain = (num_units + _CHAINS - 1) // _CHAINS
    lane = tl.arange(0, LANES)
    chain, row, t = lane // 32, lane // 4 % 8, lane % 4
    units = as_offset(tile * 2, WIDE) * num_units + chain * per_chain
    own = tl.minimum(num_units - chain * per_chain, per_chain)
    words = words_ptr + (units * UNIT_WORDS + lane % 32 * 4)
    at_scale = units * PAIRS + row * (PAIRS // 8)
    scales = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at_scale
    minima = minima_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at_scale
    words_8, scales_8 = words + num_units * UNIT_WORDS, scales + num_units * PAIRS
    minima_8 = minima + num_units * PAIRS if HAS_MINIMA else minima
    # Weights are there before the launch before this one has ended; nothing else is.
    w0, w1, w2, w3, s0, s1, s2, s3, m0, m1, m2, m3 = _lane_unit(
        words, scales, minima, 0, own, PER_WORD, GROUP, HAS_MINIMA, IS_EVEN, LANES
    )
    v0, v1, v2, v3, r0, r1, r2, r3, n0, n1, n2, n3 = _lane_unit(
        words_8, scales_8, minima_8, 0, own, PER_WORD, GROUP, HAS_MINIMA, IS_EVEN, LANES
    )
    follow(OVERLAPS)
    num_live = first + tl.load(live_ptr)
    last = tl.maximum(num_live - 1, 0)
    x_words = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    x_words += chain * (per_chain * (8 * PER_WORD)) + t * 4
    x = x_words + as_offset(tl.minimum(first + row, last), WIDE) * (x_stride // 2)
    x_8 = x_words + as_offset(tl.minimum(first + 8 + row, last), WIDE) * (x_stride // 2)
    d0 = tl.zeros([LANES], tl.float32)
    d1, d2, d3, d4, d5, d6, d7 = d0, d0, d0, d0, d0, d0, d0
    d0, d1, d2, d3, d4, d5, d6, d7 = _add_unit(
        d0, d1, d2, d3, d4, d5, d6, d7, w0, w1, w2, w3, s0, s1, s2, s3, m0, m1, m2, m3, v0, v1,
        v2, v3, r0, r1, r2, r3, n0, n1, n2, n3, x, x_8, 0, own, PER_WORD, GROUP, ZERO,
        HAS_MINIMA, IS_EVEN, IS_BOTH, LANES,
    )  # fmt: skip
    for step in tl.range(1, per_chain, num_stages=1):
        # Both are asked for before either is used.
        w0, w1, w2, w3, s0, s1, s2, s3, m0, m1, m2, m3 = _lane_unit(
            words, scales, minima, step, own, PER_WORD, GROUP, HAS_MINIMA, IS_EVEN, LANES
        )
        v0, v1, v2, v3, r0, r1, r2, r3, n0, n1, n2, n3 = _lane_unit(
            words_8, scales_8, minima_8, step, own, PER_WORD, GROUP, HAS_MINIMA, IS_EVEN, LANES
        )
        d0, d1, d2, d3, d4, d5, d6, d7 = _add_unit(
            d0, d1, d2, d3, d4, d5, d6, d7, w0, w1, w2, w3, s0, s1, s2, s3, m0, m1, m2, m3, v0,
            v1, v2, v3, r0, r1, r2, r3, n0, n1, n2, n3, x, x_8, step, own, PER_WORD, GROUP, ZERO,
            HAS_MINIMA, IS_EVEN, IS_BOTH, LANES,
        )  # fmt: skip
    below = _fold_lanes(d0, d1, d2, d3)
    above = _fold_lanes(d4, d5, d6, d7) if IS_BOTH else below
    return below, above, num_live


@triton.jit
def _store(
    row_scales_ptr, bias_ptr, out_ptr, out_stride, factor, total, rows, outputs, num_live,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    live = rows < num_live
    total *= tl.load(row_scales_ptr + rows, mask=live, other=0.0) * factor
    store_outputs(
        out_ptr, rows, outputs, out_stride, total, bias_ptr, live, HAS_BIAS, ACCUMULATE, WIDE
    )


@triton.jit
def few_outputs(
    x_ptr, row_scales_ptr, live_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr,
    out_stride, factor, tile, first, num_units, x_stride, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ON_NVIDIA: tl.constexpr, OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr, IS_FRAGMENTS: tl.constexpr, IS_EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one weight for the rows from `first` on, as many as live_ptr says.

    A kernel that has waited for the launch before it gives no OVERLAPS.
    """
    if ON_NVIDIA and IS_FRAGMENTS:
        total, above, num_live = _by_warps(
            x_ptr,
            live_ptr,
            words_ptr,
            scales_ptr,
            minima_ptr,
            tile,
            first,
            num_units,
            x_stride,
            PER_WORD,
            GROUP,
            ZERO,
            HAS_MINIMA,
            OVERLAPS,
            WIDE,
            IS_EVEN,
            ROWS == 16,
        )
        outputs = tl.arange(0, 8)[:, None, None, None] + 8 * tl.arange(0, 2)[None, None, None, :]
        pair = tl.arange(0, 4)[None, :, None, None]
        rows = first + 2 * pair + tl.arange(0, 2)[None, None, :, None]
        if ROWS == 16:
            _store(
                row_scales_ptr, bias_ptr, out_ptr, out_stride, factor, above, rows + 8,
                tile * OUTPUTS + outputs, num_live, HAS_BIAS, ACCUMULATE, WIDE,
            )  # fmt: skip
    else:
        follow(OVERLAPS)
        num_live = first + tl.load(live_ptr)
        total = _side_by_side(
            x_ptr,
            words_ptr,
            scales_ptr,
            minima_ptr,
            tile,
            first,
            num_live,
            num_units,
            x_stride,
            PER_WORD,
            GROUP,
            ZERO,
            HAS_MINIMA,
            ON_NVIDIA,
            WIDE,
            IS_FRAGMENTS,
            OUTPUTS,
            ROWS,
            STAGES,
        )
        rows, outputs = first + tl.arange(0, ROWS)[None, :], tl.arange(0, OUTPUTS)[:, None]
    _store(
        row_scales_ptr, bias_ptr, out_ptr, out_stride, factor, total, rows,
        tile * OUTPUTS + outputs, num_live, HAS_BIAS, ACCUMULATE, WIDE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "num_tiles", "num_tiles_2"])
def linear_codes_few_kernel(
    x_ptr, row_scales_ptr, counts_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr,
    out_stride, factor, words_2_ptr, scales_2_ptr, minima_2_ptr, bias_2_ptr, out_2_ptr,
    out_2_stride, factor_2, words_3_ptr, scales_3_ptr, minima_3_ptr, bias_3_ptr, out_3_ptr,
    out_3_stride, factor_3, num_tiles, num_tiles_2, count, num_units, x_stride,
    NUM_WEIGHTS: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    ON_NVIDIA: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    IS_FRAGMENTS: tl.constexpr, IS_EVEN: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tile, live_ptr = tl.program_id(0), counts_ptr + count
    # Each weight has code of its own: guarded, an access is held against that weight alone.
    if NUM_WEIGHTS == 3:
        if tile >= num_tiles + num_tiles_2:
            few_outputs(
                x_ptr, row_scales_ptr, live_ptr, words_3_ptr, scales_3_ptr, minima_3_ptr,
                bias_3_ptr, out_3_ptr, out_3_stride, factor_3, tile - num_tiles - num_tiles_2, 0,
                num_units, x_stride, PER_WORD, GROUP, ZERO, HAS_MINIMA, HAS_BIAS, ACCUMULATE,
                ON_NVIDIA, OVERLAPS, WIDE, IS_FRAGMENTS, IS_EVEN, OUTPUTS, ROWS, STAGES,
            )  # fmt: skip
            return
    if NUM_WEIGHTS > 1:
        if tile >= num_tiles:
            few_outputs(
                x_ptr, row_scales_ptr, live_ptr, words_2_ptr, scales_2_ptr, minima_2_ptr,
                bias_2_ptr, out_2_ptr, out_2_stride, factor_2, tile - num_tiles, 0, num_units,
                x_stride, PER_WORD, GROUP, ZERO, HAS_MINIMA, HAS_BIAS, ACCUMULATE, ON_NVIDIA,
                OVERLAPS, WIDE, IS_FRAGMENTS, IS_EVEN, OUTPUTS, ROWS, STAGES,
            )  # fmt: skip
            return
    few_outputs(
        x_ptr, row_scales_ptr, live_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr,
        out_stride, factor, tile, 0, num_units, x_stride, PER_WORD, GROUP, ZERO, HAS_MINIMA,
        HAS_BIAS, ACCUMULATE, ON_NVIDIA, OVERLAPS, WIDE, IS_FRAGMENTS, IS_EVEN, OUTPUTS, ROWS,
        STAGES,
    )  # fmt: skip
