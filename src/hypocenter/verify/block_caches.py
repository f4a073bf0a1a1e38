"""Caches of blocks (Q8_0, Q4_0): their bytes drawn, read as numbers, and rows as blocks.

A value's row is the bytes of blocks as GGUF has them, one block behind the other, and so is a key's
column (`kernels/attention/kv_write.py`).
"""

from __future__ import annotations

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.kernels.weights import block_types

_BLOCK = 32
#: Scales that are drawn: so numbers are about as large as those of other caches.
_SCALES = {DType.Q8_0: (0.005, 0.02), DType.Q4_0: (0.1, 0.4)}
#: How near to a tie a quotient must be for its code to be one of two.
_NEAR_TIE = 2.0**-16


def is_of_blocks(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in _SCALES


def draw_cache(name: str, tensor: Tensor, rng: np.random.Generator) -> None:
    """Fill a cache with blocks of random codes."""
    shape = _byte_shape(name, tensor)
    rows = shape if name == "v_cache" else (*shape[:2], shape[3], shape[2])
    blocks = rng.integers(0, 256, rows, np.uint8).reshape(-1, tensor.dtype.block_bytes)
    scales = rng.uniform(*_SCALES[tensor.dtype], len(blocks)).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    values = blocks.reshape(rows)
    write_cache(tensor, values if name == "v_cache" else values.swapaxes(2, 3))


def write_cache(tensor: Tensor, values: Array) -> None:
    """Put bytes, in the axes of `read_cache`, into a cache."""
    to = memory.as_bytes(tensor)
    copies.to_device(to, np.ascontiguousarray(values).reshape(to.shape))


def read_cache(name: str, tensor: Tensor) -> Array:
    """The bytes of a cache, keys u8 [num_blocks, num_heads, row bytes, block_size], values u8
    [num_blocks, num_heads, block_size, row bytes]."""
    held: Array = copies.to_host(memory.as_bytes(tensor))
    return held.view(np.uint8).reshape(_byte_shape(name, tensor))


def with_error(name: str, values: Array, dtype: DType, place: tuple[int, ...]) -> Array:
    """The bytes with the code of one number, at its place in a cache of floats, off by four."""
    changed = values.copy()
    rows = changed if name == "v_cache" else changed.swapaxes(2, 3)
    block, head, *others = place
    token, column = others if name == "v_cache" else others[::-1]
    begin, at = column // _BLOCK * dtype.block_bytes + 2, column % _BLOCK
    row = rows[block, head, token]
    if dtype is DType.Q8_0:
        code = int(row[begin + at].view(np.int8))
        row[begin + at] = (code - 4 if code > 0 else code + 4) & 0xFF
    else:
        row[begin + at % 16] ^= 0x44
    return changed


def numbers_of_rows(rows: Array, dtype: DType) -> Array:
    """Rows of blocks, u8 [..., row bytes], as numbers f64 [..., columns]."""
    flat = np.ascontiguousarray(rows).reshape(-1, rows.shape[-1])
    columns = rows.shape[-1] // dtype.block_bytes * _BLOCK
    values = block_types.dequantise(flat, dtype, columns)
    return values.reshape(*rows.shape[:-1], columns).astype(np.float64)


def numbers_of_cache(name: str, values: Array, dtype: DType) -> Array:
    """A whole cache as numbers, f64, in the axes that one of floats has."""
    if name == "v_cache":
        return numbers_of_rows(values, dtype)
    found: Array = numbers_of_rows(values.swapaxes(2, 3), dtype).swapaxes(2, 3)
    return found


def rounded_rows(rows: Array, off: Array, dtype: DType) -> tuple[Array, Array]:
    """What rows f64 [..., columns], each number off by up to `off`, are as blocks, and how far that
    may be off: a code that is near a tie may be the next one.

    Source: ggml, quantize_row_q8_0_ref and quantize_row_q4_0_ref.
    """
    x = rows.astype(np.float32).reshape(-1, _BLOCK)
    spare = np.broadcast_to(off, rows.shape).reshape(-1, _BLOCK)
    at = np.abs(x).argmax(axis=1)
    largest = np.take_along_axis(x, at[:, None], axis=1)
    is_q8 = dtype is DType.Q8_0
    step = np.abs(largest) / np.float32(127) if is_q8 else largest / np.float32(-8)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step != 0)
    scaled = (x * inverse).astype(np.float64)
    codes = np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)
    if not is_q8:
        codes = np.minimum(np.floor(scaled + 8.5), 15) - 8
    scale = step.astype(np.float16).astype(np.float64)
    distance = np.abs(np.abs(scaled - np.floor(scaled)) - 0.5)
    share = spare.max(axis=1, keepdims=True) / np.maximum(np.abs(largest), 1e-30)
    may_differ = distance <= _NEAR_TIE + 256 * share
    # The scale itself is rounded to f16, by another step where its number is off.
    bound = np.where(may_differ, np.abs(scale), 0) + np.abs(codes * scale) * (
        2.0**-10 * (share > 0)
    )
    return (codes * scale).reshape(rows.shape), bound.reshape(rows.shape)


def _byte_shape(name: str, tensor: Tensor) -> tuple[int, ...]:
    sizes = list(tensor.shape)
    along = 3 if name == "v_cache" else 2
    sizes[along] = tensor.dtype.num_bytes(sizes[along])
    return tuple(sizes)
