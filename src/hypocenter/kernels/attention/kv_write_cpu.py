"""numba kernels of `kv_write`: for pages of floats, and for pages of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import get, load_first, put_half, store
from hypocenter.device.cpu.vector_blocks import (
    BLOCK,
    SCALE_BYTES,
    block_bytes,
    half_bits,
    num_columns,
    put_byte,
)

_ZERO, _ONE, _INFINITY, _NAN = (np.float32(value) for value in (0, 1, np.inf, np.nan))
_HALF, _LARGEST_CODE = np.float32(0.5), np.float32(127)
#: Codes of four bits go from -8 to 7, and are stored as 0 to 15.
_LEAST_NIBBLE, _LIFT, _LARGEST_NIBBLE = np.float32(-8), np.float32(8.5), np.int32(15)


@inline
def page_steps(cache: Any) -> Any:
    """The steps from a block and from a head to the next, in elements: either may be larger."""
    return cache.strides[0] // cache.itemsize, cache.strides[1] // cache.itemsize


@inline
def page_at(cache: Any, block: int, head: int) -> int:
    """Where the page of a head begins, in elements."""
    of_block, of_head = page_steps(cache)
    at: int = block * of_block + head * of_head
    return at


@inline
def write_values(v: Any, at: int, v_cache: Any, row: int, head_dim: int) -> None:
    """The values of a head to where its row of the cache begins."""
    for d in range(0, head_dim, 16):
        store(v_cache, row + d, load_first(v, at + d, head_dim - d))


@cpu_kernel
def kv_write(k: Any, v: Any, counts: Any, slots: Any, k_cache: Any, v_cache: Any) -> None:
    """Formula: k_cache[slot // block_size, h, d, slot % block_size] = k[t, h, d], and
    v_cache[slot // block_size, h, slot % block_size, d] = v[t, h, d], with slot = slots[t].
    Shapes: k and v f32 [num_tokens, >= num_kv_heads * head_dim]; counts i32 [2]; slots i32
    [num_tokens]; k_cache [num_blocks, num_kv_heads, head_dim, block_size] and v_cache
    [num_blocks, num_kv_heads, block_size, value_pitch], f16 or f32.
    Source: Kwon et al., arXiv 2309.06180 (paged caches).
    """
    num_heads, head_dim, block_size = k_cache.shape[1], k_cache.shape[2], k_cache.shape[3]
    for token in prange(get(counts, 0)):
        slot = get(slots, token)
        block, offset = slot // block_size, slot % block_size
        for head in range(num_heads):
            at = token * k.shape[1] + head * head_dim
            place = page_at(k_cache, block, head) + offset
            for d in range(head_dim):
                put_half(k_cache, place + d * block_size, get(k, at + d))
            row = page_at(v_cache, block, head) + offset * v_cache.shape[3]
            write_values(v, token * v.shape[1] + head * head_dim, v_cache, row, head_dim)


@inline
def _largest(x: Any, at: int) -> Any:
    """The number of the largest magnitude of a block's 32, the first of several; NaN
    where one is no number, so that the whole block is none."""
    top = get(x, at)
    for column in range(at, at + BLOCK):
        value = get(x, column)
        if not abs(value) < _INFINITY:
            return _NAN
        if abs(value) > abs(top):
            top = value
    return top


@inline
def _put_scale(out: Any, place: int, step: int, scale: float) -> None:
    bits = half_bits(scale)
    put_byte(out, place, bits)
    put_byte(out, place + step, bits >> np.int32(8))


@inline
def _put_bytes(x: Any, at: int, out: Any, place: int, step: int) -> None:
    """A block of Q8_0: codes are rounded to the nearest integer, halves away from zero."""
    largest = abs(_largest(x, at))
    scale = largest / _LARGEST_CODE
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    _put_scale(out, place, step, scale)
    for column in range(BLOCK):
        scaled = get(x, at + column) * inverse
        code = np.int32(scaled) if largest < _INFINITY else np.int32(0)
        rest = scaled - np.float32(code)
        if rest >= _HALF:
            code += np.int32(1)
        if rest <= -_HALF:
            code -= np.int32(1)
        put_byte(out, place + (SCALE_BYTES + column) * step, code)


@inline
def _nibble(value: float, inverse: float) -> Any:
    lifted = value * inverse + _LIFT
    # Of what is no number there is no code: the scale says it.
    return min(np.int32(lifted), _LARGEST_NIBBLE) if lifted >= _ZERO else np.int32(0)


@inline
def _put_nibbles(x: Any, at: int, out: Any, place: int, step: int) -> None:
    """A block of Q4_0: the number of the largest magnitude has the code -8."""
    scale = _largest(x, at) / _LEAST_NIBBLE
    inverse = _ONE / scale if scale != _ZERO else _ZERO
    _put_scale(out, place, step, scale)
    for column in range(BLOCK // 2):
        lower = _nibble(get(x, at + column), inverse)
        upper = _nibble(get(x, at + column + BLOCK // 2), inverse)
        put_byte(out, place + (SCALE_BYTES + column) * step, lower | upper << np.int32(4))


@inline
def write_blocks(x: Any, at: int, num_blocks: int, out: Any, place: int, step: int) -> None:
    """Numbers from `at` on as blocks, whose bytes are `step` apart from `place` on.

    The bytes are those that ggml's quantize_row_q8_0_ref and quantize_row_q4_0_ref give.
    """
    num_bytes = block_bytes(out)
    for block in range(num_blocks):
        begin = place + block * num_bytes * step
        if num_bytes == SCALE_BYTES + BLOCK:
            _put_bytes(x, at + block * BLOCK, out, begin, step)
        else:
            _put_nibbles(x, at + block * BLOCK, out, begin, step)


@cpu_kernel
def kv_write_blocks(k: Any, v: Any, counts: Any, slots: Any, k_cache: Any, v_cache: Any) -> None:
    """Formula: as kv_write, of blocks of 32 numbers x: code = round(x / scale), with scale =
    max|x| / 127 for Q8_0; Q4_0 has codes of four bits.
    Shapes: k and v f32 [num_tokens, >= num_kv_heads * head_dim]; counts i32 [2]; slots i32
    [num_tokens]; k_cache and v_cache as in kv_write, of blocks of 32.
    Source: ggml, quantize_row_q8_0_ref and quantize_row_q4_0_ref.
    """
    num_heads, block_size = k_cache.shape[1], k_cache.shape[3]
    head_dim = num_columns(k_cache, k_cache.shape[2])
    num_blocks = head_dim // BLOCK
    for token in prange(get(counts, 0)):
        slot = get(slots, token)
        page, offset = slot // block_size, slot % block_size
        for head in range(num_heads):
            at = token * k.shape[1] + head * head_dim
            place = page_at(k_cache, page, head) + offset
            write_blocks(k, at, num_blocks, k_cache, place, block_size)
            at = token * v.shape[1] + head * head_dim
            row = page_at(v_cache, page, head) + offset * v_cache.shape[3]
            write_blocks(v, at, num_blocks, v_cache, row, 1)
