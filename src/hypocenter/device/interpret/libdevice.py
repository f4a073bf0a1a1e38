"""Functions that NumPy lacks and Triton's interpreter needs: those of libdevice.

Holds no interpreter: `interpret.py` says where these functions stand in.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hypocenter.base.dtypes import Array


def _elementwise(function: Callable[..., float]) -> Callable[..., Array]:
    """A function of Python floats as one of arrays that keeps the first argument's type."""
    vectorised = np.vectorize(function, otypes=[np.float64])

    def call(first: Array, *rest: Array) -> Array:
        result: Array = vectorised(first, *rest).astype(first.dtype)
        return result

    return call


def _rsqrt(x: Array) -> Array:
    result: Array = (1 / np.sqrt(x)).astype(x.dtype)
    return result


def _as_unsigned(x: Array) -> Array:
    """The same bits without a sign."""
    return x.view(f"u{x.dtype.itemsize}")


def _bit_length(x: Array) -> Array:
    """The number of bits down from the highest that is set; 0 for 0."""
    lengths: Array = np.vectorize(lambda value: int(value).bit_length(), otypes=[np.int32])(
        _as_unsigned(np.ascontiguousarray(x))
    )
    return lengths


#: libdevice name to what computes it. The fast variants of CUDA are computed exactly: a check
#: looks at addresses, and no address hangs on the last bits of a sine.
LIBDEVICE: dict[str, Callable[..., Array]] = {
    **{
        name: getattr(np, function)
        for name, function in {
            "abs": "abs", "acos": "arccos", "acosh": "arccosh", "asin": "arcsin",
            "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2", "atanh": "arctanh",
            "cbrt": "cbrt", "ceil": "ceil", "copysign": "copysign", "cos": "cos", "cosh": "cosh",
            "div_rn": "divide", "exp": "exp", "exp2": "exp2", "expm1": "expm1",
            "fast_cosf": "cos", "fast_dividef": "divide", "fast_expf": "exp",
            "fast_log2f": "log2", "fast_logf": "log", "fast_powf": "power", "fast_sinf": "sin",
            "fast_tanf": "tan", "fast_tanhf": "tanh", "floor": "floor", "fmod": "fmod",
            "hypot": "hypot", "isinf": "isinf", "isnan": "isnan", "isfinited": "isfinite",
            "finitef": "isfinite", "ldexp": "ldexp", "llrint": "rint", "log": "log",
            "log10": "log10", "log1p": "log1p", "log2": "log2", "nearbyint": "rint",
            "pow": "power", "rint": "rint", "signbit": "signbit", "sin": "sin", "sinh": "sinh",
            "sqrt": "sqrt", "sqrt_rn": "sqrt", "tan": "tan", "tanh": "tanh", "trunc": "trunc",
        }.items()
    },
    "clz": lambda x: 8 * x.dtype.itemsize - _bit_length(x),
    "erf": _elementwise(math.erf),
    "erfc": _elementwise(math.erfc),
    "fdim": lambda x, y: np.maximum(x - y, 0),
    "ffs": lambda x: _bit_length(x & -x),
    "float_as_int": lambda x: x.view(np.int32),
    "fma": lambda x, y, z: x * y + z,
    "int_as_float": lambda x: x.view(np.float32),
    "popc": lambda x: np.bitwise_count(_as_unsigned(x)),
    "saturatef": lambda x: np.clip(x, 0, 1),
    "exp10": lambda x: np.power(10.0, x).astype(x.dtype),
    "lgamma": _elementwise(math.lgamma),
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x).astype(x.dtype),
    "rsqrt": _rsqrt,
    "rsqrt_rn": _rsqrt,
    "tgamma": _elementwise(math.gamma),
}  # fmt: skip
