"""numba kernel of `head_linear`: an item is 64 outputs of a head for all tokens.

An output adds its inputs one by one, each by one fused step; tokens are taken by 4 or 1 with the
same steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import fma, get, load, put, splat, store_first
from hypocenter.device.cpu.vector_ir import LANES

_BLOCK = 64


@inline
def _put(out: Any, at: int, total: Any, num_left: int) -> None:
    """Up to 16 outputs, as far as they are there."""
    if num_left > 0:
        store_first(out, at, total, min(num_left, LANES))


@inline
def _one_token(
    x: Any, x_at: int, weight: Any, at: int, num_inputs: int, out: Any, out_at: int, num_left: int
) -> None:
    pitch, zero = weight.shape[2], splat(np.float32(0))
    t0, t1, t2, t3 = zero, zero, zero, zero
    for i in range(num_inputs):
        value, row = splat(get(x, x_at + i)), at + i * pitch
        t0 = fma(value, load(weight, row), t0)
        t1 = fma(value, load(weight, row + 16), t1)
        t2 = fma(value, load(weight, row + 32), t2)
        t3 = fma(value, load(weight, row + 48), t3)
    _put(out, out_at, t0, num_left)
    _put(out, out_at + 16, t1, num_left - 16)
    _put(out, out_at + 32, t2, num_left - 32)
    _put(out, out_at + 48, t3, num_left - 48)


@inline
def _four_tokens(
    x: Any, x_at: int, weight: Any, at: int, num_inputs: int, out: Any, out_at: int, num_left: int
) -> None:
    """16 outputs of four tokens, so that what is read of the weight serves them all."""
    pitch, zero = weight.shape[2], splat(np.float32(0))
    step, out_step = x.shape[1], out.shape[1]
    t0, t1, t2, t3 = zero, zero, zero, zero
    for i in range(num_inputs):
        factor = load(weight, at + i * pitch)
        t0 = fma(splat(get(x, x_at + i)), factor, t0)
        t1 = fma(splat(get(x, x_at + step + i)), factor, t1)
        t2 = fma(splat(get(x, x_at + 2 * step + i)), factor, t2)
        t3 = fma(splat(get(x, x_at + 3 * step + i)), factor, t3)
    _put(out, out_at, t0, num_left)
    _put(out, out_at + out_step, t1, num_left)
    _put(out, out_at + 2 * out_step, t2, num_left)
    _put(out, out_at + 3 * out_step, t3, num_left)


@inline
def _keep(x: Any, x_at: int, out: Any, out_at: int, num_kept: int) -> None:
    for i in range(num_kept):
        put(out, out_at + i, get(x, x_at + i))


@cpu_kernel
def head_linear(
    x: Any, weight: Any, out: Any, counts: Any, num_outputs: int, num_kept: int
) -> None:
    """Formula: out[t, h] = x[t, h, num_inputs:] followed by weight[h].T x[t, h, :num_inputs].
    Shapes: x f32 [num_tokens, >= num_heads * (num_inputs + num_kept)]; weight f32 [num_heads,
    num_inputs, pitch]; out f32 [num_tokens, >= num_heads * (num_kept + num_outputs)]; counts
    i32 [2].
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
    """
    num_tokens, num_inputs, pitch = get(counts, 0), weight.shape[1], weight.shape[2]
    num_blocks = (num_outputs + _BLOCK - 1) // _BLOCK
    for item in prange(weight.shape[0] * num_blocks):
        head, block = item // num_blocks, item % num_blocks
        at = head * num_inputs * pitch + block * _BLOCK
        num_left = num_outputs - block * _BLOCK
        x_at, first = head * (num_inputs + num_kept), head * (num_kept + num_outputs)
        out_at, token = first + num_kept + block * _BLOCK, 0
        while token + 4 <= num_tokens:
            row, to = token * x.shape[1] + x_at, token * out.shape[1] + out_at
            for column in range(0, min(num_left, _BLOCK), LANES):
                _four_tokens(
                    x, row, weight, at + column, num_inputs, out, to + column, num_left - column
                )
            token += 4
        while token < num_tokens:
            row, to = token * x.shape[1] + x_at, token * out.shape[1] + out_at
            _one_token(x, row, weight, at, num_inputs, out, to, num_left)
            token += 1
        for token in range(num_tokens if block == 0 else 0):
            kept = token * x.shape[1] + x_at + num_inputs
            _keep(x, kept, out, token * out.shape[1] + first, num_kept)
