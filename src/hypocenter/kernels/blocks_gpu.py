"""Triton parts that write and read blocks of Q8_0 and Q4_0, as GGUF has them, in arrays of bytes.

`BLOCK_BYTES` is 34 or 18 and tells which; 0 stands for floats. A block has an f16 scale and 32
codes, of a byte each or two to a byte, where the first 16 are the lower halves.
"""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.triton_lang import tl, triton


def block_bytes(cache: Tensor) -> int:
    """What `BLOCK_BYTES` is for a cache."""
    return cache.dtype.block_bytes if cache.dtype.is_quantised else 0


@triton.jit
def _byte_code(x, inverse):
    """x * inverse rounded to the nearest integer, halves away from zero."""
    scaled = x * inverse
    code = scaled.to(tl.int32)
    rest = scaled - code.to(tl.float32)
    return code + (rest >= 0.5).to(tl.int32) - (rest <= -0.5).to(tl.int32)


@triton.jit
def _nibble_code(x, inverse):
    """x * inverse as 0 to 15, of which 8 is zero."""
    return tl.minimum((x * inverse + 8.5).to(tl.int32), 15)


@triton.jit
def write_blocks(
    x_ptr,
    cache_ptr,
    at,
    step,
    num_blocks,
    BLOCK_BYTES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Numbers of `num_blocks` blocks, whose bytes go to `at` and on, `step` apart from each other.

    The bytes are those that ggml's reference makes. A block with what is no number has a scale
    that is none.
    """
    block = tl.arange(0, NUM_BLOCKS)
    live = block < num_blocks
    column = tl.arange(0, 16)[None, :]
    x_at = block[:, None] * 32 + column
    low = tl.load(x_ptr + x_at, mask=live[:, None], other=0.0)
    high = tl.load(x_ptr + x_at + 16, mask=live[:, None], other=0.0)
    are_numbers = (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
    is_sound = tl.min(are_numbers.to(tl.int32), axis=1) > 0
    low = tl.where(is_sound[:, None], low, 0.0)
    high = tl.where(is_sound[:, None], high, 0.0)
    low_size, high_size = tl.abs(low), tl.abs(high)
    largest = tl.maximum(tl.max(low_size, axis=1), tl.max(high_size, axis=1))
    if BLOCK_BYTES == 34:
        scale = tl.div_rn(largest, 127.0)
    else:
        # The first of the largest, with its sign.
        is_low, is_high = low_size == largest[:, None], high_size == largest[:, None]
        first = tl.minimum(
            tl.min(tl.where(is_low, column, 32), axis=1),
            tl.min(tl.where(is_high, column + 16, 32), axis=1),
        )[:, None]
        top = tl.sum(tl.where(column == first, low, 0.0), axis=1)
        top += tl.sum(tl.where(column + 16 == first, high, 0.0), axis=1)
        scale = top * -0.125
    one = tl.full([NUM_BLOCKS], 1.0, tl.float32)
    inverse = tl.where(scale != 0, tl.div_rn(one, tl.where(scale != 0, scale, 1.0)), 0.0)[:, None]
    half = tl.where(is_sound, scale, float("nan")).to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    begin = at + block * (BLOCK_BYTES * step)
    tl.store(cache_ptr + begin, (bits & 255).to(tl.uint8), mask=live)
    tl.store(cache_ptr + begin + step, (bits >> 8 & 255).to(tl.uint8), mask=live)
    codes = cache_ptr + begin[:, None] + (column + 2) * step
    if BLOCK_BYTES == 34:
        tl.store(codes, (_byte_code(low, inverse) & 255).to(tl.uint8), mask=live[:, None])
        upper = _byte_code(high, inverse) & 255
        tl.store(codes + 16 * step, upper.to(tl.uint8), mask=live[:, None])
    else:
        both = _nibble_code(low, inverse) | _nibble_code(high, inverse) << 4
        tl.store(codes, both.to(tl.uint8), mask=live[:, None])


@triton.jit
def _scales(cache_ptr, begin, step, mask):
    """The scales of blocks whose bytes are at `begin` and on, `step` apart from each other."""
    lower = tl.load(cache_ptr + begin, mask=mask).to(tl.int32)
    upper = tl.load(cache_ptr + begin + step, mask=mask).to(tl.int32)
    return (lower | upper << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _codes(cache_ptr, begin, step, column, mask, BLOCK_BYTES: tl.constexpr):
    """Codes of columns 0 to 31 of such blocks, in f32."""
    if BLOCK_BYTES == 34:
        raw = tl.load(cache_ptr + begin + (column + 2) * step, mask=mask)
        return raw.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        raw = tl.load(cache_ptr + begin + (column % 16 + 2) * step, mask=mask)
        return ((raw.to(tl.int32) >> (column // 16 * 4) & 15) - 8).to(tl.float32)


@triton.jit
def load_key_blocks(
    cache_ptr,
    at,
    step,
    first,
    num_blocks,
    mask,
    BLOCK_BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """COLUMNS columns of keys from block `first` on, [columns, keys] in f16; 0 behind `num_blocks`.

    The blocks of a key begin at `at` [keys]. A column is its code times its scale, rounded once.
    What is masked is numbers, not codes: a compiler would move codes to where a product wants them,
    where threads hold the same ones, and unpack them there, for which they have no registers.
    """
    block = first + tl.arange(0, COLUMNS // 32)
    begin = at[None, :] + block[:, None] * (BLOCK_BYTES * step)
    live = (block < num_blocks)[:, None] & mask[None, :]
    scale = _scales(cache_ptr, begin, step, live)
    column = tl.arange(0, 32)[None, :, None]
    code = _codes(cache_ptr, begin[:, None, :], step, column, live[:, None, :], BLOCK_BYTES)
    found = tl.where(live[:, None, :], (code * scale[:, None, :]).to(tl.float16), 0.0)
    return tl.reshape(found, [COLUMNS, at.shape[0]])


@triton.jit
def load_value_blocks(
    cache_ptr, at, num_blocks, mask, BLOCK_BYTES: tl.constexpr, COLUMNS: tl.constexpr
):
    """COLUMNS columns of values, [keys, columns] in f16, likewise; a block is in one piece."""
    block = tl.arange(0, COLUMNS // 32)
    begin = at[:, None] + block[None, :] * BLOCK_BYTES
    live = mask[:, None] & (block < num_blocks)[None, :]
    scale = _scales(cache_ptr, begin, 1, live)
    column = tl.arange(0, 32)[None, None, :]
    code = _codes(cache_ptr, begin[:, :, None], 1, column, live[:, :, None], BLOCK_BYTES)
    found = tl.where(live[:, :, None], (code * scale[:, :, None]).to(tl.float16), 0.0)
    return tl.reshape(found, [at.shape[0], COLUMNS])
