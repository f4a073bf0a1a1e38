"""Test-side launches of single ops: numpy arrays in, numpy arrays out, through the real door."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np

from hypocenter.base.tensor import WEIGHT_TYPES, DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.device.cpu import lang
from hypocenter.device.cpu.whole_kernels import compile_whole
from hypocenter.device.launch import run
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.weights.packing import pack, place
from hypocenter.kernels.weights.row_groups import padded_rows

Array = np.ndarray[Any, Any]

#: Byte offsets of the f16 scale fields of each block type.
SCALE_FIELDS: dict[DType, tuple[int, ...]] = {
    DType.Q4_0: (0,),
    DType.Q4_1: (0, 2),
    DType.Q5_0: (0,),
    DType.Q5_1: (0, 2),
    DType.Q8_0: (0,),
    DType.Q2_K: (80, 82),
    DType.Q3_K: (108,),
    DType.Q4_K: (0, 2),
    DType.Q5_K: (0, 2),
    DType.Q6_K: (208,),
    DType.IQ4_NL: (0,),
    DType.IQ4_XS: (0,),
    **dict.fromkeys((DType.IQ3_S, DType.IQ3_XXS, DType.IQ2_S, DType.IQ2_XS, DType.IQ2_XXS), (0,)),
    **dict.fromkeys((DType.IQ1_S, DType.Q2_0, DType.Q1_0), (0,)),
    DType.TQ2_0: (64,),
    DType.TQ1_0: (52,),
}
#: The device that the functions below put tensors and launches on; a fixture may change it.
device = "cpu"

_KINDS = {"float32": DType.F32, "uint16": DType.F16, "int32": DType.I32}

BLOCK_TYPES = tuple(dtype for dtype in WEIGHT_TYPES if dtype.is_quantised)


def for_python(function: Any) -> Any:
    """A function that kernels call, compiled so that Python can call it as well."""
    inner = getattr(function, "py_func", function)
    twin = FunctionType(inner.__code__, inner.__globals__, inner.__name__, None, inner.__closure__)
    # numba tells machine code apart by this name.
    twin.__qualname__, twin.__module__ = f"{inner.__qualname__}_for_python", inner.__module__
    return compile_whole(twin, _nrt=False, **lang._OPTIONS)


def random_rows(dtype: DType, num_rows: int, num_columns: int, seed: int = 0) -> Array:
    """GGUF bytes, uint8 [num_rows, row_bytes]: random blocks with finite scales in -1 .. 1."""
    rng = np.random.default_rng(seed)
    if not dtype.is_quantised:
        values = rng.standard_normal((num_rows, num_columns)).astype(np.float32)
        if dtype is DType.F16:
            return values.astype(np.float16).view(np.uint8)
        if dtype is DType.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.view(np.uint8)
    num_blocks = num_columns // dtype.block_elements
    blocks = rng.integers(0, 256, (num_rows, num_blocks, dtype.block_bytes), np.uint8)
    if dtype is DType.MXFP4:  # powers of two
        blocks[..., :1] = rng.integers(110, 128, (num_rows, num_blocks, 1), np.uint8)
    if dtype is DType.NVFP4:  # e4m3 of up to 2
        blocks[..., :4] = rng.integers(0, 65, (num_rows, num_blocks, 4), np.uint8)
    if dtype is DType.IQ1_M:  # four bits of an f16 in each word
        halves = rng.uniform(-1, 1, (num_rows, num_blocks, 1)).astype(np.float16).view(np.uint16)
        tops = (halves >> np.array([0, 4, 8, 12], np.uint16) & 15) << 4
        blocks[..., 49::2] = blocks[..., 49::2] & 15 | tops.astype(np.uint8)
    for offset in SCALE_FIELDS.get(dtype, ()):
        scales = rng.uniform(-1, 1, (num_rows, num_blocks, 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def tensor(name: str, values: Array) -> Tensor:
    """A device tensor of f32, f16 bits or i32 values, of exactly their shape."""
    kind = _KINDS[values.dtype.name]
    made = memory.allocate(name, "test", kind, values.shape, device=device)
    copies.to_device(made, values)
    return made


def transposed(name: str, values: Array) -> Tensor:
    """As `tensor`, with the second axis outermost, as CPU caches lie."""
    made = memory.allocate_transposed(name, "test", _KINDS[values.dtype.name], values.shape)
    copies.to_device(made, values)
    return made


def rows_tensor(name: str, values: Array, fill: float = 0.0) -> Tensor:
    """Activations: rows padded to 64 columns, the padding holding `fill`."""
    wide = np.full((len(values), padded_rows(values.shape[1])), fill, np.float32)
    wide[:, : values.shape[1]] = values
    return tensor(name, wide)


def vector_tensor(name: str, values: Array) -> Tensor:
    """A norm weight or bias, padded to 64."""
    wide = np.zeros(padded_rows(len(values)), np.float32)
    wide[: len(values)] = values
    return tensor(name, wide)


def weight_tensor(dtype: DType, raw: Array, num_columns: int) -> Tensor:
    return place("weight", "test", pack(raw, dtype, num_columns, device=device), device=device)


def counts(num_tokens: int, num_logit_rows: int = 0) -> Tensor:
    return tensor("counts", np.array([num_tokens, num_logit_rows], np.int32))


def launch(op: Callable[[PlanBuilder], None], num_rows: int) -> int:
    """Build a plan of what `op` asks for in a bucket of `num_rows` rows, and run it.

    Returns the number of launches.
    """
    plan = PlanBuilder(num_rows, device)
    op(plan)
    run(plan.launches)
    return len(plan.launches)


def bits(values: Array) -> Array:
    """f32 as integers, so that equality means every bit, NaN and signed zero included."""
    return np.ascontiguousarray(values).view(np.uint32)
