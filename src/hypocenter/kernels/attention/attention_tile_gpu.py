"""Triton parts of `attention`: one tile of keys, and how the results of tiles are folded.

Both forms in `attention_gpu.py` are made of these, so a query's result has the same bits in each.
Nothing here depends on a tile's other rows, on the page size or on how threads share the work:
sums over keys and over a head's elements are those of tl.dot, which adds in order, maxima are
exact, and the rest is element by element, with every fused multiply-add written as one.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.blocks_gpu import load_key_blocks, load_value_blocks
from hypocenter.kernels.shared_gpu import as_offset

#: Softmax weights are this times what the formula says, so that small ones are normal numbers of
#: f16; the division by the norm takes it out again.
_WEIGHT = tl.constexpr(16384.0)
#: Elements of a head that rows of f16 take at a time, where no GPU's registers hold it all.
_PIECE = tl.constexpr(64)


@triton.jit
def _tanh(x):
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def _unit(largest):
    """Powers of two that bring each row's largest magnitude to 2**13 .. 2**14, and 1 / them."""
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 20), 254)
    unit = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    return unit, ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def stack_rows(ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Where a tile of tl.dot holds what: the row, and which of its parts, behind each of ROWS rows.

    16 rows hold the parts of 16 / PARTS rows, part by part: a part's rows and those of the next
    are then in the same registers on most GPUs, and adding them up moves nothing.
    """
    at = tl.arange(0, ROWS)
    if PARTS == 1:
        return at, tl.zeros([ROWS], tl.int32)
    else:
        return at // 16 * (16 // PARTS) + at % (16 // PARTS), at % 16 // (16 // PARTS)


@triton.jit
def _take_part(x, part, PARTS: tl.constexpr):
    """Each row of x f32 as the part that is asked for, [rows]; the parts of a row add up to it.

    One part is x rounded to f16, as what it is multiplied by was. Three are bf16 (the fourth is 0),
    and exact.
    """
    if PARTS == 1:
        return x.to(tl.float16)
    else:
        part = part[:, None]
        high, middle, low = _thirds(x)
        return tl.where(
            part < 2, tl.where(part == 0, high, middle), tl.where(part == 2, low, low * 0)
        )


@triton.jit
def _cut(x):
    """The upper 16 bits of f32: x as bf16, cut off and not rounded."""
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _thirds(x):
    high = _cut(x)
    rest = x - high.to(tl.float32)
    middle = _cut(rest)
    return high, middle, _cut(rest - middle.to(tl.float32))


@triton.jit
def _sum_parts(x, PARTS: tl.constexpr):
    """The parts of each row of x [ROWS, n] added up, [ROWS / PARTS, n].

    Always two at a time: of a sum of more it would be the compiler's choice where it begins.
    """
    ROWS: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    if PARTS == 1:
        return x
    else:
        pairs = tl.sum(tl.reshape(x, (ROWS // 16, 2, 2, 4, n)), axis=1)
        return tl.reshape(tl.sum(pairs, axis=1), (ROWS // 4, n))


@triton.jit
def _repeat_parts(x, PARTS: tl.constexpr):
    """Rows of x [rows, n] as often as they have parts, [rows * PARTS, n]: the way back."""
    if PARTS == 1:
        return x
    else:
        rows: tl.constexpr = x.shape[0]
        n: tl.constexpr = x.shape[1]
        PER: tl.constexpr = 16 // PARTS
        stacked = tl.reshape(x, (rows // PER, 1, PER, n))
        wide = tl.broadcast_to(stacked, (rows // PER, PARTS, PER, n))
        return tl.reshape(wide, (rows * PARTS, n))


@triton.jit
def _exact_product(a, y, total):
    """total + a @ y for rows of thirds and y f32."""
    high, middle, low = _thirds(y)
    return tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low, total)))


@triton.jit
def load_query(
    q_ptr, token, head, live, part, q_stride, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of q as `attend_tile` takes them, repeated and parted as `stack_rows` says, or their
    powers of two where they are not HELD but read piece by piece; where each row begins; and what
    their products must be multiplied by, [rows]. A row that is not live may be anything."""
    ROWS: tl.constexpr = token.shape[0]
    at = as_offset(token, WIDE) * q_stride + head * HEAD_DIM
    if PARTS == 4:
        at = tl.where(live, at, 0)
        return at, at, tl.full([ROWS // PARTS], 1.0, tl.float32)
    elif HELD:
        d = tl.arange(0, BLOCK)
        mask = live[:, None] & (d < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + at[:, None] + d[None, :], mask=mask, other=0.0)
        unit, back = _unit(tl.max(tl.abs(q), axis=1))
        return _take_part(q * unit[:, None], part, PARTS), at, back
    else:
        at = tl.where(live, at, 0)
        largest = tl.zeros([ROWS], tl.float32)
        for start in range(0, HEAD_DIM, _PIECE):
            d = start + tl.arange(0, _PIECE)
            x = tl.load(q_ptr + at[:, None] + d[None, :], mask=(d < HEAD_DIM)[None, :], other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
        unit, back = _unit(largest)
        return unit, at, back


@triton.jit
def _keys(
    k_cache_ptr,
    page,
    within,
    start,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns from `start` on of the keys at `within` their pages, [columns, keys]."""
    if BLOCK_BYTES:
        num_blocks: tl.constexpr = HEAD_DIM // 32
        at = page * (num_blocks * BLOCK_BYTES * BLOCK_SIZE) + within
        return load_key_blocks(
            k_cache_ptr,
            at,
            BLOCK_SIZE,
            start // 32,
            num_blocks,
            within >= 0,
            BLOCK_BYTES,
            COLUMNS,
        )
    else:
        d = start + tl.arange(0, COLUMNS)
        at = (page[None, :] * HEAD_DIM + d[:, None]) * BLOCK_SIZE + within[None, :]
        return tl.load(k_cache_ptr + at, mask=(d < HEAD_DIM)[:, None], other=0.0)


@triton.jit
def _add_piece(
    total, q_ptr, q_at, part, k_cache_ptr, page, within, start, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """total + what the head's elements from `start` on add to the scores, in thirds."""
    d = start + tl.arange(0, PIECE)
    k = _keys(k_cache_ptr, page, within, start, HEAD_DIM, BLOCK_SIZE, 0, PIECE)
    x_at = q_at[:, None] + d[None, :]
    x = tl.load(q_ptr + x_at, mask=(d < HEAD_DIM)[None, :], other=0.0)
    return _exact_product(_take_part(x, part, 4), k, total)


@triton.jit
def _add_half_piece(
    total,
    unit,
    q_ptr,
    q_at,
    part,
    k_cache_ptr,
    page,
    within,
    start,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):
    """The same of rows times their powers of two, rounded to f16."""
    d = start + tl.arange(0, PIECE)
    x_at = q_at[:, None] + d[None, :]
    x = tl.load(q_ptr + x_at, mask=(d < HEAD_DIM)[None, :], other=0.0)
    k = _keys(k_cache_ptr, page, within, start, HEAD_DIM, BLOCK_SIZE, BLOCK_BYTES, PIECE)
    return tl.dot(_take_part(x * unit[:, None], part, 1), k, total)


@triton.jit
def _scores(
    q, q_ptr, q_at, part, k_cache_ptr, page, within, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PARTS: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Products of query rows with the keys at `within` their pages, [rows, keys]."""
    if HELD:
        k = _keys(k_cache_ptr, page, within, 0, HEAD_DIM, BLOCK_SIZE, BLOCK_BYTES, BLOCK)
        return _sum_parts(tl.dot(q, k), PARTS)
    elif PARTS == 1:
        total = tl.zeros([part.shape[0], page.shape[0]], tl.float32)
        for start in range(0, HEAD_DIM, _PIECE):
            total = _add_half_piece(
                total,
                q,
                q_ptr,
                q_at,
                part,
                k_cache_ptr,
                page,
                within,
                start,
                HEAD_DIM,
                BLOCK_SIZE,
                _PIECE,
                BLOCK_BYTES,
            )
        return _sum_parts(total, PARTS)
    else:
        # Piece by piece: thirds of whole keys do not fit the registers of every GPU, and those of
        # long heads not even where a compiler sees all the pieces and loads them early.
        total = tl.zeros([part.shape[0], page.shape[0]], tl.float32)
        PIECE: tl.constexpr = 32 if BLOCK > 32 else BLOCK
        if HEAD_DIM <= 128:
            for start in tl.static_range(0, HEAD_DIM, PIECE):
                total = _add_piece(
                    total,
                    q_ptr,
                    q_at,
                    part,
                    k_cache_ptr,
                    page,
                    within,
                    start,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    PIECE,
                )
        else:
            for start in range(0, HEAD_DIM, PIECE):
                total = _add_piece(
                    total,
                    q_ptr,
                    q_at,
                    part,
                    k_cache_ptr,
                    page,
                    within,
                    start,
                    HEAD_DIM,
                    BLOCK_SIZE,
                    PIECE,
                )
        return _sum_parts(total, PARTS)


@triton.jit
def _page(table_ptr, key, last, BLOCK_SIZE: tl.constexpr):
    """The page of each key; that of `last` for the keys behind it.

    A page holds whole vectors of 16 keys, so each 16 have the same page: the compiler must know
    this, or it loads key by key.
    """
    return tl.max_constancy(tl.load(table_ptr + tl.minimum(key, last) // BLOCK_SIZE), 16)


@triton.jit
def attend_tile(
    q, q_ptr, q_at, part, factor, position, whole_until, table_ptr, k_cache_ptr, v_cache_ptr,
    softcap, window, start, last, kv_head, num_kv_heads, value_pitch, HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Keys start .. start + TILE - 1 as far as `last`: each row's largest score, the sum of its
    weights and its weighted values [rows, BLOCK].

    q, q_at, factor: as `load_query` gives them; part as `stack_rows` does; position [rows]. Keys
    before `whole_until` are seen by all rows but those whose result may be anything.
    """
    d, key = tl.arange(0, BLOCK), start + tl.arange(0, TILE)
    page = as_offset(_page(table_ptr, key, last, BLOCK_SIZE), WIDE) * num_kv_heads + kv_head
    column = d < VALUE_DIM
    if BLOCK_BYTES:
        num_blocks: tl.constexpr = VALUE_DIM // 32
        v_at = (page * BLOCK_SIZE + key % BLOCK_SIZE) * value_pitch
        v = load_value_blocks(v_cache_ptr, v_at, num_blocks, key <= last, BLOCK_BYTES, BLOCK)
    else:
        v_at = (page * BLOCK_SIZE + key % BLOCK_SIZE)[:, None] * value_pitch + d[None, :]
        v = tl.load(v_cache_ptr + v_at, mask=(key <= last)[:, None] & column[None, :], other=0.0)
    # Keys behind `last` may be anything: their scores are not used.
    score = _scores(
        q,
        q_ptr,
        q_at,
        part,
        k_cache_ptr,
        page,
        key % BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_SIZE,
        PARTS,
        HELD,
        BLOCK,
        BLOCK_BYTES,
    )
    score = score * factor[:, None]
    if HAS_SOFTCAP:
        score = softcap * _tanh(score / softcap)
    # 0 <= age < reach as one comparison: AMD's compiler keeps two scalar registers for each. Of a
    # tile that all rows see whole there is nothing to compare.
    if start + TILE > whole_until:
        age = (position[:, None] - key[None, :]).to(tl.uint32, bitcast=True)
        reach = tl.where(window > 0, window, 0x7FFFFFFF).to(tl.uint32)
        score = tl.where(age < reach, score, -float("inf"))
    top = tl.max(score, axis=1)
    weight = tl.exp(score - tl.where(top == -float("inf"), 0.0, top)[:, None]) * _WEIGHT
    weights = _take_part(_repeat_parts(weight, PARTS), part, PARTS)
    ones = tl.full([TILE, 16], 1.0, weights.dtype)
    norm = tl.max(_sum_parts(tl.dot(weights, ones), PARTS), axis=1)
    if PARTS == 1:
        return top, norm, _sum_parts(tl.dot(weights, v), PARTS)
    else:
        none = tl.zeros([part.shape[0], BLOCK], tl.float32)
        return top, norm, _sum_parts(_exact_product(weights, v, none), PARTS)


@triton.jit
def with_sink(norm, top, sink):
    """The sum of weights relative to the largest score, and that of a sink, which has no value."""
    return norm + tl.exp(sink - top) * _WEIGHT


@triton.jit
def fold(top, other):
    """The larger of two maxima of scores, and what scales the sums behind each to it."""
    new = tl.maximum(top, other)
    shift = tl.where(new == -float("inf"), 0.0, new)
    return new, tl.exp(top - shift), tl.exp(other - shift)
