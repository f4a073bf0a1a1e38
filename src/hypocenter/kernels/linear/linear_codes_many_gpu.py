"""Triton kernels of `linear` for weights of block types and many rows: sums by the matrix units.

They give the bits of `linear_codes_gpu.py`: sums within a group are exact, and the chains are the
same. For some rows bytes are multiplied, and the 16 chains run side by side. For many, x is code
times scale in f16, which is exact (`spread_gpu.py`), and so is the sum of a group in f32: integers
below 2**23 times the unit of the scale. Weights' scales have 17 bits at most, so the product of
both scales is exact too, and sum times scales enters the chain with one rounding everywhere.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.linear_codes_gpu import both_scales, fold_chains
from hypocenter.kernels.shared_gpu import as_offset, follow, store_outputs
from hypocenter.kernels.weights.gpu_layout import CODE_LANES

_LANES = tl.constexpr(CODE_LANES)


@triton.jit
def _low_nibbles(words):
    return tl.inline_asm_elementwise(
        "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [words], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def _high_nibbles(words):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
        "=r,r",
        [words],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _less(codes, ZERO: tl.constexpr):
    """Four at a time: the upper bit keeps each from borrowing of its neighbour."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; or.b32 t, $1, 0x80808080; sub.u32 t, t, $2; xor.b32 $0, t, 0x80808080; }",
        "=r,r,r",
        [codes, tl.full(codes.shape, ZERO, tl.int8)],
        dtype=tl.int8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _bytes(words, SHIFT: tl.constexpr, ZERO: tl.constexpr, ON_NVIDIA: tl.constexpr):
    """Codes of nibbles in bytes, less ZERO."""
    if not ON_NVIDIA:
        return (((words >> SHIFT) & 15) - ZERO).to(tl.int8)
    else:
        codes = _low_nibbles(words) if SHIFT == 0 else _high_nibbles(words)
        return _less(codes, ZERO) if ZERO > 0 else codes


@triton.jit
def _add_half(
    acc, w, x, x_scales, sums_at, scales, minima, inside, column, GROUP: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
):  # fmt: skip
    """32 columns of a unit of each chain, their groups in order."""
    x_scale = tl.load(x_scales, mask=inside, other=0.0)
    if HAS_MINIMA:
        sums = tl.load(sums_at)
        sum0, sum1 = (sums << 16) >> 16, sums >> 16
    for part in tl.static_range(32 // GROUP):
        if GROUP == 32:
            products = tl.dot(w, x, out_dtype=tl.int32)
        else:
            # The other half group counts nothing.
            some = tl.where((column // 16 == part)[None, :, None], x, 0)
            products = tl.dot(w, some.to(tl.int8), out_dtype=tl.int32)
        scale = tl.load(scales + part, mask=inside, other=0.0).to(tl.float32)
        acc = tl.fma(products.to(tl.float32), scale[:, :, None] * x_scale[:, None, :], acc)
        if HAS_MINIMA:
            low = tl.load(minima + part, mask=inside, other=0.0).to(tl.float32)
            if GROUP == 32:
                xsum = sum0 + sum1
            else:
                xsum = sum0 if part == 0 else sum1
            acc = tl.fma(low[:, :, None], (xsum.to(tl.float32) * x_scale)[:, None, :], acc)
    return acc


@triton.jit
def some_outputs(
    codes_ptr, x_scales_ptr, sums_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr, out_ptr,
    out_stride, tile, first, num_live, num_units, x_pitch, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ON_NVIDIA: tl.constexpr, WIDE: tl.constexpr,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """OUTPUTS outputs of one weight for the rows of a tile, which end at num_live."""
    UNIT_BYTES: tl.constexpr = 256 * _LANES // PER_WORD
    PER_UNIT: tl.constexpr = 64 // GROUP
    rows = first + tl.arange(0, ROWS)
    at_row = as_offset(tl.minimum(rows, num_live - 1), WIDE)
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    chain, column = tl.arange(0, 16), tl.arange(0, 32)
    row_plane = as_offset(outputs // _LANES, WIDE) * num_units
    weights = (
        words_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
        + (row_plane * UNIT_BYTES + (outputs % _LANES) * 16)[None, :, None]
        + ((column // 16) * (16 * _LANES) + column % 16)[None, None, :]
    )
    codes = (
        codes_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
        + (at_row * x_pitch * 4)[None, None, :]
        + column[None, :, None]
    )
    scale_at = ((row_plane * _LANES + outputs % _LANES) * PER_UNIT)[None, :]
    group_at = (at_row * (x_pitch // 8))[None, :]
    acc = tl.zeros([16, OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, num_units, 16, num_stages=STAGES):
        wanted = start + chain
        inside, unit = (wanted < num_units)[:, None], tl.minimum(wanted, num_units - 1)
        s = scale_at + (unit * (_LANES * PER_UNIT))[:, None]
        g = group_at + (unit * 2)[:, None]
        at = (unit * UNIT_BYTES)[:, None, None]
        low_codes = tl.load(weights + at)
        if PER_WORD == 4:
            high_codes = tl.load(weights + (at + 32 * _LANES))
        for half in tl.static_range(2):
            if PER_WORD == 8:
                w = _bytes(low_codes, 4 * half, ZERO, ON_NVIDIA)
            else:
                w = low_codes if half == 0 else high_codes
            acc = _add_half(
                acc,
                w,
                tl.load(codes + (unit * 64)[:, None, None] + 32 * half),
                x_scales_ptr + (g + half),
                sums_ptr + (g + half),
                scales_ptr + (s + half * (32 // GROUP)),
                minima_ptr + (s + half * (32 // GROUP)),
                inside,
                column,
                GROUP,
                HAS_MINIMA,
            )
    # From ranges of their own, or compilers keep what the first ones gave over the whole loop.
    rows = first - ROWS + tl.arange(ROWS, 2 * ROWS)
    outputs = (tile - 1) * OUTPUTS + tl.arange(OUTPUTS, 2 * OUTPUTS)
    store_outputs(
        out_ptr,
        rows[:, None],
        outputs[None, :],
        out_stride,
        fold_chains(tl.permute(acc, (2, 0, 1)), ROWS, OUTPUTS),
        bias_ptr,
        (rows < num_live)[:, None],
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
    )


@triton.jit(do_not_specialize=["count"])
def linear_codes_some_kernel(
    codes_ptr, x_scales_ptr, sums_ptr, counts_ptr, words_ptr, scales_ptr, minima_ptr, bias_ptr,
    out_ptr, count, num_units, x_pitch, out_stride, PER_WORD: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, ON_NVIDIA: tl.constexpr, SCALE_BITS: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    first = tl.program_id(1) * ROWS
    num_live = tl.load(counts_ptr + count)
    if first >= num_live:
        return
    some_outputs(
        codes_ptr,
        x_scales_ptr,
        sums_ptr,
        words_ptr,
        scales_ptr,
        minima_ptr,
        bias_ptr,
        out_ptr,
        out_stride,
        tl.program_id(0),
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
        WIDE,
        OUTPUTS,
        ROWS,
        STAGES,
    )


@triton.jit
def _four(words, KEEP: tl.constexpr, LESS: tl.constexpr):
    """The bytes of a word, of them the bits KEEP, as f16 less LESS: 1024 + a byte is its bits."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; prmt.b32 a, $4, 0x64646464, 0x5150; prmt.b32 b, $4, 0x64646464, 0x5352;"
        "and.b32 a, a, $5; and.b32 b, b, $5; sub.f16x2 a, a, $6; sub.f16x2 b, b, $6;"
        "mov.b32 {$0, $1}, a; mov.b32 {$2, $3}, b; }",
        "=h,=h,=h,=h,r,r,r",
        [words, KEEP, LESS],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _halves(
    words, SHIFT: tl.constexpr, PER_WORD: tl.constexpr, ZERO: tl.constexpr, OUTPUTS: tl.constexpr,
    ON_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Words [OUTPUTS, chunks, 4] as codes f16 [OUTPUTS, chunks * 16], in the order of `spread`.

    In that order each lane of a matrix unit's warp has its numbers from one word.
    """
    if not ON_NVIDIA:
        if PER_WORD == 8:
            a, b = ((words >> SHIFT) & 15) - ZERO, ((words >> (8 + SHIFT)) & 15) - ZERO
            c, d = ((words >> (16 + SHIFT)) & 15) - ZERO, ((words >> (24 + SHIFT)) & 15) - ZERO
        else:
            a, b = (words << 24) >> 24, (words << 16) >> 24
            c, d = (words << 8) >> 24, words >> 24
        a, b, c, d = a.to(tl.float16), b.to(tl.float16), c.to(tl.float16), d.to(tl.float16)
    elif PER_WORD == 8:
        # Halves of 1024 + ZERO.
        a, b, c, d = _four(words >> SHIFT, -0xF000F1, 0x64006400 + 0x10001 * ZERO)
    else:
        a, b, c, d = _four(words ^ -0x7F7F7F80, -1, 0x64806480)
    fours = tl.join(tl.join(a, b), tl.join(c, d))  # [OUTPUTS, chunks, word, even and odd, pair]
    return tl.reshape(tl.permute(fours, (0, 1, 4, 2, 3)), (OUTPUTS, 4 * words.numel // OUTPUTS))


@triton.jit
def _apart(ON_NVIDIA: tl.constexpr):
    """In a branch that is seldom taken: keeps compilers from computing it always, to select."""
    if ON_NVIDIA:
        tl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _add_pair(
    acc, weights, x, sums_at, scales, minima, inside, pair: tl.constexpr, PER_WORD: tl.constexpr,
    GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr, SCALE_BITS: tl.constexpr,
    OUTPUTS: tl.constexpr, ON_NVIDIA: tl.constexpr,
):  # fmt: skip
    """Two groups of a unit, whose scales are read at once."""
    CHUNK: tl.constexpr = 4 * _LANES  # words of 16 columns
    scale0, scale1 = both_scales(scales, inside, SCALE_BITS)
    low0, low1 = scale0, scale1
    if HAS_MINIMA:
        low0, low1 = both_scales(minima, inside, SCALE_BITS)
    if PER_WORD == 8:
        # Both halves of a unit share words: of whole ones in one pair, of shorter groups in two.
        words0 = tl.load(weights)
        words1 = words0 if GROUP == 32 else tl.load(weights + CHUNK)
    else:
        words0 = tl.load(weights + 2 * pair * (GROUP // 16) * CHUNK)
        words1 = tl.load(weights + (2 * pair + 1) * (GROUP // 16) * CHUNK)
    for part in tl.static_range(2):
        words = words0 if part == 0 else words1
        if PER_WORD == 4:
            w = _halves(words, 0, PER_WORD, ZERO, OUTPUTS, ON_NVIDIA)
        elif GROUP == 32:
            w = _halves(words, 4 * part, PER_WORD, ZERO, OUTPUTS, ON_NVIDIA)
        else:
            w = _halves(words, 4 * pair, PER_WORD, ZERO, OUTPUTS, ON_NVIDIA)
        products = tl.dot(w, tl.load(x + (2 * pair + part) * GROUP))
        acc = tl.fma(products, (scale0 if part == 0 else scale1)[:, None], acc)
        if HAS_MINIMA:
            if GROUP == 32:
                xsum = tl.load(sums_at + (part * 3 + 2) * 64)
            else:
                xsum = tl.load(sums_at + (pair * 3 + part) * 64)
            acc = tl.fma((low0 if part == 0 else low1)[:, None], xsum[None, :], acc)
    return acc


@triton.jit(do_not_specialize=["count"])
def linear_codes_kernel(
    spread_ptr, row_scales_ptr, row_sums_ptr, counts_ptr, words_ptr, scales_ptr, minima_ptr,
    bias_ptr, out_ptr, count, num_units, num_steps, x_stride, sums_stride, out_stride,
    PER_WORD: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, HAS_MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, ON_NVIDIA: tl.constexpr,
    SCALE_BITS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    first = tl.program_id(0) * ROWS
    num_live = tl.load(counts_ptr + count)
    if first >= num_live:
        return
    UNIT_WORDS: tl.constexpr = 64 * _LANES // PER_WORD
    PER_UNIT: tl.constexpr = 64 // GROUP
    CHUNKS: tl.constexpr = GROUP // 16
    rows = first + tl.arange(0, ROWS)
    at_row = as_offset(tl.minimum(rows, num_live - 1), WIDE)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    chunk, word, column = tl.arange(0, CHUNKS), tl.arange(0, 4), tl.arange(0, GROUP)
    row_plane = as_offset(outputs // _LANES, WIDE) * num_units
    weights = (
        words_ptr
        + (row_plane * UNIT_WORDS + outputs % _LANES * 4)[:, None, None]
        + (chunk * (4 * _LANES))[None, :, None]
        + word[None, None, :]
    )
    x = spread_ptr + (at_row * x_stride)[None, :] + column[:, None]
    scale_at = (row_plane * _LANES + outputs % _LANES) * PER_UNIT
    # Three of 64 rows for each group of 32 columns: of its first, its last and all its codes.
    sums_at = row_sums_ptr + (at_row // 64 * sums_stride + at_row % 64)
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(0, tl.minimum(num_units, 16) * num_steps, num_stages=STAGES):
        wanted = (step % num_steps) * 16 + step // num_steps
        unit = tl.minimum(wanted, num_units - 1)
        inside = (outputs >= 0) & (wanted < num_units)
        s = scale_at + unit * (_LANES * PER_UNIT)
        for pair in tl.static_range(PER_UNIT // 2):
            acc = _add_pair(
                acc,
                weights + unit * UNIT_WORDS,
                x + unit * 64,
                sums_at + unit * 384,
                scales_ptr + (s + 2 * pair),
                minima_ptr + (s + 2 * pair),
                inside,
                pair,
                PER_WORD,
                GROUP,
                ZERO,
                HAS_MINIMA,
                SCALE_BITS,
                OUTPUTS,
                ON_NVIDIA,
            )
        if step % num_steps == num_steps - 1:
            _apart(ON_NVIDIA)
            total += acc
            acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    total *= tl.load(row_scales_ptr + at_row)[None, :]
    rows = first - ROWS + tl.arange(ROWS, 2 * ROWS)
    outputs = (tl.program_id(1) - 1) * OUTPUTS + tl.arange(OUTPUTS, 2 * OUTPUTS)
    store_outputs(
        out_ptr,
        rows[None, :],
        outputs[:, None],
        out_stride,
        total,
        bias_ptr,
        (rows < num_live)[None, :],
        HAS_BIAS,
        ACCUMULATE,
        WIDE,
    )
