"""numba kernels that make blocks of signs or of three levels around 0: Q1_0, Q2_0, TQ1_0, TQ2_0.

Nothing is searched for, so columns have no weights. Blocks are laid out as
`kernels/weights/block_types.py` reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import allocating_kernel, inline_allocating, prange
from hypocenter.device.cpu.rounding import rounded_away
from hypocenter.kernels.blocks.plain_cpu import put_half
from hypocenter.kernels.blocks.searches_cpu import largest_size

_ZERO, _ONE = np.float32(0), np.float32(1)
#: GGUF's numbers of the types.
TQ1_0, TQ2_0, Q1_0, Q2_0 = 34, 35, 41, 42


@inline_allocating
def _make_signs(x: Any, block: Any) -> None:
    """A block of Q1_0: the mean size, and a bit for each column that is not negative."""
    total = _ZERO
    for i in range(128):
        total += abs(x[i])
    put_half(block, 0, total / np.float32(128))
    for byte in range(16):
        found = 0
        for bit in range(8):
            found |= (1 if x[8 * byte + bit] >= _ZERO else 0) << bit
        block[2 + byte] = found


@inline_allocating
def _levels(x: Any, codes: Any) -> Any:
    """The largest size, and x by it as 0, 1 and 2 for -1, 0 and 1; what no number comes of in C's
    `roundf` is left as it is."""
    size, _ = largest_size(x)
    inverse = _ONE / size if size != _ZERO else _ZERO
    for i in range(x.shape[0]):
        codes[i] = rounded_away(x[i] * inverse) + 1
    return size


@inline_allocating
def _make_pairs(x: Any, codes: Any, block: Any) -> None:
    """A block of Q2_0: four columns that lie side by side in a byte."""
    put_half(block, 0, _levels(x, codes))
    for byte in range(16):
        found = 0
        for part in range(4):
            found |= min(max(codes[4 * byte + part], 0), 3) << (2 * part)
        block[2 + byte] = found


@inline_allocating
def _make_tq2_0(x: Any, codes: Any, block: Any) -> None:
    """Four columns that are 32 apart in a byte."""
    put_half(block, 64, _levels(x, codes))
    for half in range(2):
        for i in range(32):
            found = 0
            for part in range(4):
                found |= (codes[128 * half + 32 * part + i] & 3) << (2 * part)
            block[32 * half + i] = found


@inline_allocating
def _put_digits(codes: Any, apart: int, num_digits: int, block: Any, at: int) -> None:
    """`apart` bytes, each of five digits in base three, so many columns apart, as a fraction of 256
    that is rounded up; of four digits the last is 0."""
    for i in range(apart):
        number = 0
        for digit in range(num_digits):
            number = (3 * number + codes[apart * digit + i]) & 255
        if num_digits == 4:
            number = (3 * number) & 255
        block[at + i] = ((256 * number + 242) // 243) & 255


@inline_allocating
def _make_tq1_0(x: Any, codes: Any, block: Any) -> None:
    put_half(block, 52, _levels(x, codes))
    _put_digits(codes[:160], 32, 5, block, 0)
    _put_digits(codes[160:240], 16, 5, block, 32)
    _put_digits(codes[240:], 4, 4, block, 48)


@allocating_kernel
def _quantise_few_bits_cpu(x: Any, weights: Any, blocks: Any, kind: int) -> None:
    """Formula: blocks = a scale, and the sign of each column or the nearest of -1, 0 and 1 times
    it, `kind` being the type's number in GGUF files: 34, 35, 41 or 42.
    Shapes: x f32 [num_rows, num_columns]; weights f32 [0]; blocks u8 [num_rows, row_bytes],
    written.
    Source: ggml's ggml-quants.c, quantize_row_tq1_0_ref, tq2_0_ref, q1_0_ref and q2_0_ref.
    """
    num = 256
    if kind == Q1_0:
        num = 128
    elif kind == Q2_0:
        num = 64
    num_blocks = x.shape[1] // num
    block_bytes = blocks.shape[1] // num_blocks
    for row in prange(x.shape[0]):
        codes = np.empty(num, np.int64)
        for n in range(num_blocks):
            of_block = x[row, num * n : num * n + num]
            block = blocks[row, block_bytes * n : block_bytes * n + block_bytes]
            if kind == Q1_0:
                _make_signs(of_block, block)
            elif kind == Q2_0:
                _make_pairs(of_block, codes, block)
            elif kind == TQ1_0:
                _make_tq1_0(of_block, codes, block)
            else:
                _make_tq2_0(of_block, codes, block)
