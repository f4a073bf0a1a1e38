"""numba kernels of `activation`. Rows are padded to 64 columns, so whole vectors are safe."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.lang import cpu_kernel, inline, prange
from hypocenter.device.cpu.vector import (
    absolute,
    add,
    div,
    exp2,
    fma,
    get,
    larger,
    load,
    load_first,
    mul,
    sigmoid,
    smaller,
    splat,
    store,
    sub,
    tanh,
)
from hypocenter.kernels.linear.quantise_cpu import num_parts_of, num_tiles_of, part_of, put_codes

_TWICE_SQRT_2_OVER_PI = np.float32(1.5957691216057308)
_CUBIC = np.float32(0.044715)
# Half of Abramowitz and Stegun's 7.1.26, for x over the root of 2.
_ERF_STEP = np.float32(0.23164189)
_ERF_1, _ERF_2, _ERF_3 = np.float32(0.127414796), np.float32(-0.142248368), np.float32(0.7107068705)
_ERF_4, _ERF_5 = np.float32(-0.7265760135), np.float32(0.5307027145)
_HALF_LOG2_E = np.float32(0.7213475204444817)
_STEEP, _LIMIT, _ONE = np.float32(1.702), np.float32(7), np.float32(1)


@inline
def _gelu(x: Any) -> Any:
    cubic = fma(mul(splat(_CUBIC), mul(x, x)), x, x)
    return mul(x, sigmoid(mul(splat(_TWICE_SQRT_2_OVER_PI), cubic)))


@inline
def _gelu_erf(x: Any) -> Any:
    """What is above 0 of x, less |x| times the normal distribution's integral beyond |x|."""
    size = absolute(x)
    t = div(splat(_ONE), fma(splat(_ERF_STEP), size, splat(_ONE)))
    series = fma(splat(_ERF_5), t, splat(_ERF_4))
    series = fma(series, t, splat(_ERF_3))
    series = fma(series, t, splat(_ERF_2))
    series = mul(fma(series, t, splat(_ERF_1)), t)
    tail = mul(series, exp2(mul(splat(-_HALF_LOG2_E), mul(x, x))))
    return sub(larger(splat(np.float32(0)), x), mul(size, tail))


@inline
def apply_gate(x: Any, up: Any, kind: int) -> Any:
    """kind(x) * up, `kind` being a number of GATES; NaN stays what it is."""
    if kind == 0:
        return mul(mul(x, sigmoid(x)), up)
    if kind == 1:
        return mul(_gelu(x), up)
    if kind == 4:
        return mul(sigmoid(x), up)
    if kind == 5:
        return mul(x, up)
    x = smaller(splat(_LIMIT), x)
    up = larger(splat(-_LIMIT), smaller(splat(_LIMIT), up))
    return mul(mul(x, sigmoid(mul(splat(_STEEP), x))), add(up, splat(_ONE)))


@inline
def _gate(gate: Any, up: Any, at: int, left: int, kind: int) -> Any:
    """16 columns, of which the first `left` are there and the others 0."""
    return apply_gate(load_first(gate, at, left), load_first(up, at, left), kind)


@cpu_kernel
def gate(gate: Any, up: Any, counts: Any, kind: int) -> None:
    """Formula: gate = kind(gate) up, in place; kinds are in `activation.py`.
    Shapes: gate and up f32 [num_rows, width]; counts i32 [2].
    Source: Shazeer, arXiv 2002.05202.
    """
    width = gate.shape[1]
    for row in prange(get(counts, 0)):
        for at in range(row * width, (row + 1) * width, 16):
            store(gate, at, apply_gate(load(gate, at), load(up, at), kind))


@cpu_kernel
def gate_codes(
    gate: Any,
    up: Any,
    counts: Any,
    kind: int,
    width: int,
    codes: Any,
    scales: Any,
    sums: Any,
    weighted: Any,
) -> None:
    """Formula: codes = quantise(kind(gate) up), as the kernels gate and quantise make it.
    Shapes: gate and up f32 [num_rows, >= width]; counts i32 [2]; codes i32 [num_tiles,
    num_groups, tile, 8], scales f32 [num_tiles, num_groups, tile], sums i32 and weighted f32
    [num_tiles, num_groups, 3, tile].
    Source: Shazeer, arXiv 2002.05202.
    """
    num_rows = get(counts, 0)
    for item in prange(num_tiles_of(num_rows, codes) * num_parts_of(width)):
        begin, end, first, last = part_of(item, num_rows, width, codes)
        for row in range(begin, end):
            for group in range(first, last):
                at, left = row * gate.shape[1] + 32 * group, width - 32 * group
                put_codes(
                    _gate(gate, up, at, left, kind),
                    _gate(gate, up, at + 16, left - 16, kind),
                    codes,
                    scales,
                    sums,
                    weighted,
                    row,
                    group,
                )


@inline
def _activate(x: Any, kind: int) -> Any:
    """kind(x), `kind` being a number of ACTIVATIONS; NaN stays what it is."""
    if kind == 1:
        return _gelu(x)
    if kind == 6:
        return _gelu_erf(x)
    positive = larger(splat(np.float32(0)), x)
    return mul(positive, positive)


@cpu_kernel
def activate(x: Any, counts: Any, kind: int) -> None:
    """Formula: x = kind(x), in place: gelu, gelu_erf, or max(x, 0)**2.
    Shapes: x f32 [num_rows, width]; counts i32 [2].
    Source: Hendrycks and Gimpel, arXiv 1606.08415; So et al., arXiv 2109.08668.
    """
    width = x.shape[1]
    for row in prange(get(counts, 0)):
        for at in range(row * width, (row + 1) * width, 16):
            store(x, at, _activate(load(x, at), kind))


@cpu_kernel
def activate_codes(
    x: Any, counts: Any, kind: int, width: int, codes: Any, scales: Any, sums: Any, weighted: Any
) -> None:
    """Formula: codes = quantise(kind(x)), as the kernels activate and quantise make it.
    Shapes: x f32 [num_rows, >= width]; counts i32 [2]; codes i32 [num_tiles, num_groups, tile,
    8], scales f32 [num_tiles, num_groups, tile], sums i32 and weighted f32 [num_tiles,
    num_groups, 3, tile].
    Source: Hendrycks and Gimpel, arXiv 1606.08415; So et al., arXiv 2109.08668.
    """
    num_rows = get(counts, 0)
    for item in prange(num_tiles_of(num_rows, codes) * num_parts_of(width)):
        begin, end, first, last = part_of(item, num_rows, width, codes)
        for row in range(begin, end):
            for group in range(first, last):
                at, left = row * x.shape[1] + 32 * group, width - 32 * group
                put_codes(
                    _activate(load_first(x, at, left), kind),
                    _activate(load_first(x, at + 16, left - 16), kind),
                    codes,
                    scales,
                    sums,
                    weighted,
                    row,
                    group,
                )


@cpu_kernel
def scale(x: Any, counts: Any, count: int, factor: float) -> None:
    """Formula: x = factor x, in place.
    Shapes: x f32 [num_rows, width]; counts i32 [2].
    """
    width = x.shape[1]
    for row in prange(get(counts, count)):
        for at in range(row * width, (row + 1) * width, 16):
            store(x, at, mul(load(x, at), splat(factor)))


@cpu_kernel
def softcap(x: Any, counts: Any, count: int, cap: float) -> None:
    """Formula: x = cap tanh(x / cap), in place.
    Shapes: x f32 [num_rows, width]; counts i32 [2].
    Source: Gemma 2, arXiv 2408.00118, section 2.
    """
    width = x.shape[1]
    for row in prange(get(counts, count)):
        for at in range(row * width, (row + 1) * width, 16):
            store(x, at, mul(splat(cap), tanh(div(load(x, at), splat(cap)))))
