"""Products of few rows by lanes of NVIDIA's warps: each has what it feeds to a matrix unit.

A warp has a chain of sixteen outputs. Weights go from memory to the matrix unit through registers
alone, and the first are asked for before the launch before has ended. How many are on their way at
a time decides how long a narrow product takes: `linear_forms.units_asked` has what was measured.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.unpack_gpu import HIGH, LOW, UNIT_WORDS, four_bytes, nibbles
from hypocenter.kernels.shared_gpu import as_offset, follow
from hypocenter.kernels.weights.gpu_layout import CHAINS, CODE_LANES

_LANES = tl.constexpr(CODE_LANES)
_CHAINS = tl.constexpr(CHAINS)


@triton.jit
def fold_chains(part):
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
def _lane_scales(
    at,
    mask,
    PER_WORD: tl.constexpr,
    GROUP: tl.constexpr,
    IS_EVEN: tl.constexpr,
    LANES: tl.constexpr,
):
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
    d, a, x, x_8, at, inside, IS_EVEN: tl.constexpr, IS_BOTH: tl.constexpr, LANES: tl.constexpr
):
    """32 columns: of x those of a lane lie together, four words (`store_halves`)."""
    d0, d1, d2, d3, d4, d5, d6, d7 = d
    a0, a1, a2, a3, a4, a5, a6, a7 = a
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
    unit, INDEX: tl.constexpr, PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
):  # fmt: skip
    """The INDEX-th 32 columns of what a lane has of a row's unit: four words of two f16."""
    w0, w1, w2, w3, s0, s1, s2, s3, m0, m1, m2, m3 = unit
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
def _ask(
    words, scales, minima, words_8, scales_8, minima_8, start, own, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, HAS_MINIMA: tl.constexpr, IS_EVEN: tl.constexpr, LANES: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """What a lane has of UNITS units, each of two rows of weights that lie eight rows apart."""
    found = ()
    for unit in tl.static_range(UNITS):
        step = start + unit
        near = _lane_unit(
            words, scales, minima, step, own, PER_WORD, GROUP, HAS_MINIMA, IS_EVEN, LANES
        )
        far = _lane_unit(
            words_8, scales_8, minima_8, step, own, PER_WORD, GROUP, HAS_MINIMA, IS_EVEN, LANES
        )
        found += ((near, far),)
    return found


@triton.jit
def _add_units(
    d, units, x, x_8, start, own, PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    HAS_MINIMA: tl.constexpr, IS_EVEN: tl.constexpr, IS_BOTH: tl.constexpr, LANES: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """d with the units that were asked for, one after another."""
    for unit in tl.static_range(UNITS):
        near, far = units[unit]
        inside, at = start + unit < own, (start + unit) * (8 * PER_WORD)
        for index in tl.static_range(PER_WORD // 2):
            a0, a2, a4, a6 = _lane_numbers(near, index, PER_WORD, GROUP, ZERO, HAS_MINIMA)
            a1, a3, a5, a7 = _lane_numbers(far, index, PER_WORD, GROUP, ZERO, HAS_MINIMA)
            a = a0, a1, a2, a3, a4, a5, a6, a7
            d = _add_columns(d, a, x, x_8, at + 16 * index, inside, IS_EVEN, IS_BOTH, LANES)
    return d


@triton.jit
def _fold_lanes(d0, d1, d2, d3):
    """The sums of each chain's lanes: [8 outputs, 4, 2 rows of x, 2 times 8 outputs]."""
    found = tl.join(tl.join(d0, d1), tl.join(d2, d3))
    return fold_chains(tl.permute(tl.reshape(found, (2, 2, 2, 8, 4, 2, 2)), (3, 4, 5, 6, 0, 1, 2)))


@triton.jit
def by_warps(
    x_ptr, live_ptr, words_ptr, scales_ptr, minima_ptr, tile, first, num_units, x_stride,
    PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, IS_EVEN: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """[8 outputs, 4, 2 rows of x, 2 times 8 outputs], that for the next 8 rows of x, and the end
    of the rows."""
    LANES: tl.constexpr = _CHAINS * 32
    IS_BOTH: tl.constexpr = ROWS == 16
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
    asked = _ask(
        words,
        scales,
        minima,
        words_8,
        scales_8,
        minima_8,
        0,
        own,
        PER_WORD,
        GROUP,
        HAS_MINIMA,
        IS_EVEN,
        LANES,
        UNITS,
    )
    follow(OVERLAPS)
    num_live = first + tl.load(live_ptr)
    x_words = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    x_words += chain * (per_chain * (8 * PER_WORD)) + t * 4
    last = tl.maximum(num_live - 1, 0)
    x = x_words + as_offset(tl.minimum(first + row, last), WIDE) * (x_stride // 2)
    x_8 = x_words + as_offset(tl.minimum(first + 8 + row, last), WIDE) * (x_stride // 2)
    zero = tl.zeros([LANES], tl.float32)
    d = zero, zero, zero, zero, zero, zero, zero, zero
    if STAGES > 1:
        # The next ones are on their way while these are added, which takes twice the registers.
        for start in tl.range(0, per_chain - UNITS, UNITS, num_stages=1):
            following = _ask(
                words,
                scales,
                minima,
                words_8,
                scales_8,
                minima_8,
                start + UNITS,
                own,
                PER_WORD,
                GROUP,
                HAS_MINIMA,
                IS_EVEN,
                LANES,
                UNITS,
            )
            d = _add_units(
                d,
                asked,
                x,
                x_8,
                start,
                own,
                PER_WORD,
                GROUP,
                ZERO,
                HAS_MINIMA,
                IS_EVEN,
                IS_BOTH,
                LANES,
                UNITS,
            )
            asked = following
        start = per_chain - UNITS
        d = _add_units(
            d,
            asked,
            x,
            x_8,
            start,
            own,
            PER_WORD,
            GROUP,
            ZERO,
            HAS_MINIMA,
            IS_EVEN,
            IS_BOTH,
            LANES,
            UNITS,
        )
    else:
        d = _add_units(
            d,
            asked,
            x,
            x_8,
            0,
            own,
            PER_WORD,
            GROUP,
            ZERO,
            HAS_MINIMA,
            IS_EVEN,
            IS_BOTH,
            LANES,
            UNITS,
        )
        for start in tl.range(UNITS, per_chain, UNITS, num_stages=1):
            asked = _ask(
                words,
                scales,
                minima,
                words_8,
                scales_8,
                minima_8,
                start,
                own,
                PER_WORD,
                GROUP,
                HAS_MINIMA,
                IS_EVEN,
                LANES,
                UNITS,
            )
            d = _add_units(
                d,
                asked,
                x,
                x_8,
                start,
                own,
                PER_WORD,
                GROUP,
                ZERO,
                HAS_MINIMA,
                IS_EVEN,
                IS_BOTH,
                LANES,
                UNITS,
            )
    d0, d1, d2, d3, d4, d5, d6, d7 = d
    below = _fold_lanes(d0, d1, d2, d3)
    above = _fold_lanes(d4, d5, d6, d7) if IS_BOTH else below
    return below, above, num_live
