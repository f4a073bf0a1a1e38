"""numba kernels of `activation`. Rows are padded to 64 columns, so whole vectors are safe."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.lang import cpu_kernel, inline, prange
from hypocenter.device.vector import div, fma, get, load, mul, splat, store
from hypocenter.device.vector_math import sigmoid, tanh

_TWICE_SQRT_2_OVER_PI = np.float32(1.5957691216057308)
_CUBIC = np.float32(0.044715)


@inline
def _gelu(x: Any) -> Any:
    cubic = fma(mul(splat(_CUBIC), mul(x, x)), x, x)
    return mul(x, sigmoid(mul(splat(_TWICE_SQRT_2_OVER_PI), cubic)))


@cpu_kernel
def gate(gate: Any, up: Any, counts: Any, kind: int) -> None:
    width = gate.shape[1]
    for row in prange(get(counts, 0)):
        for at in range(row * width, (row + 1) * width, 16):
            x = load(gate, at)
            opened = mul(x, sigmoid(x)) if kind == 0 else _gelu(x)
            store(gate, at, mul(opened, load(up, at)))


@cpu_kernel
def scale(x: Any, counts: Any, count: int, factor: float) -> None:
    width = x.shape[1]
    for row in prange(get(counts, count)):
        for at in range(row * width, (row + 1) * width, 16):
            store(x, at, mul(load(x, at), splat(factor)))


@cpu_kernel
def softcap(x: Any, counts: Any, count: int, cap: float) -> None:
    width = x.shape[1]
    for row in prange(get(counts, count)):
        for at in range(row * width, (row + 1) * width, 16):
            store(x, at, mul(splat(cap), tanh(div(load(x, at), splat(cap)))))
