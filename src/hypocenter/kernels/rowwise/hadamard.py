"""hadamard: each `size` columns of a row multiplied by the Hadamard matrix of that size, in place.

Formula: y = H x / sqrt(size), H[i, j] = -1 where i & j has an odd number of ones, else 1. The
matrix is its own transpose and, so divided, its own inverse: products of rows stay what they are,
and a second time gives x back (Sylvester's construction). A number that is larger than its
neighbours is spread over all of them, so blocks of few bits lose less of these (QuaRot, arXiv
2404.00456).

Sums and differences are taken by steps of 1, 2, 4 ... columns on all devices, so the bits are the
same on each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import Arg, Rule, Scalar, live_counts
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder

CONTRACT = Contract(
    "hadamard",
    Arg("x", (DType.F32,), "num_rows, >= width", "both"),
    live_counts("num_rows", 0),
    Scalar("width", "width > 0", "must be above 0"),
    Scalar("size", "size in (32, 64, 128, 256, 512)", "must be a power of two from 32 to 512"),
    Scalar("factor", "factor > 0", "must be above 0"),
    Rule("width % size == 0", "a row must be whole stretches"),
)
HADAMARD = Op(
    CONTRACT,
    cpu="rowwise.hadamard_cpu.hadamard",
    gpu="rowwise.hadamard_gpu.launch",
    work_per_row=lambda width: 4 * width,
)
SIZES = (32, 64, 128, 256, 512)


def reference(x: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """The formula in float64: x [num_rows, width]."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    wide = x.astype(np.float64).reshape(len(x), -1, size)
    out: np.ndarray[Any, Any] = (wide @ matrix / np.sqrt(size)).reshape(x.shape)
    return out


def sizes_of_sums(x: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """What roundings of each result are a share of: the sum of magnitudes, over sqrt(size)."""
    sums = np.abs(x).reshape(len(x), -1, size).sum(axis=2) / np.sqrt(size)
    out: np.ndarray[Any, Any] = sums.repeat(size, axis=1)
    return out


def size_for(*num_columns: int) -> int:
    """The largest size of which all these numbers of columns are multiples; they are of 32."""
    return max(size for size in SIZES if not any(number % size for number in num_columns))


def hadamard(plan: PlanBuilder, x: Tensor, counts: Tensor, *, width: int, size: int) -> None:
    """Append x = its product with Hadamard matrices, for the first `width` columns of the rows of
    x f32 [num_rows, >= width], `size` by `size`."""
    factor = float(np.float32(1) / np.sqrt(np.float32(size)))
    plan.add(HADAMARD, x=x, counts=counts, width=width, size=size, factor=factor)
