"""Tells in which form each engine reads activations at its products, by what float64 makes of them
in that form. A difference between two sound engines comes from here.

Forms of llama.cpp: `quantize_row_q8_0` and `quantize_row_q8_K_ref` of ggml-quants.c, as the AVX2
code of ggml-cpu rounds (to the nearest, ties to even). Ours: `kernels/linear/quantise.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from msgspec import Struct

from hypocenter.base.dtypes import Float32s, Float64s, bf16_to_f32, f32_to_bf16
from hypocenter.base.tensor import DType
from hypocenter.engine.float64_steps import Float64Steps, InputForm, NotComputed
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.peers.own_weights import head_of
from hypocenter.trace.comparing import ROUNDING
from hypocenter.trace.points import PointPlace, TracedStep, order_of

#: Points that hold a product alone, and the matrix of a layer that makes it.
_MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "attn_residual": "attn_output"}
#: A form explains a product that is so many times nearer to float64 by it.
_NEARER = 4.0


class SideReading(Struct, frozen=True):
    """How far a product is from float64, relative, and by how much when activations are read in
    `form`: f32 where they are read as they are, empty where no form here explains the product."""

    off: float
    form: str
    off_by_form: float


class ProductReading(Struct, frozen=True):
    """The product of the first point whose weights have this type, on both sides."""

    weights: str
    name: str
    layer: int | None
    ours: SideReading
    theirs: SideReading


def readings_of(
    file: GGUFFile,
    pairs: Iterable[tuple[TracedStep, TracedStep]],
    judges: tuple[Float64Steps, Float64Steps],
) -> Iterator[ProductReading]:
    """Find for each type of weights its first product that both sides have; `judges` are those of
    ours and of theirs. Products that have no float64 form are left out."""
    seen: set[DType] = set()
    for steps in pairs:
        for place in sorted(steps[0].points.keys() & steps[1].points.keys(), key=order_of):
            dtype = _dtype_of(file, place)
            if dtype is None or dtype in seen:
                continue
            try:
                sides = [_side(*side, place) for side in zip(judges, steps, strict=True)]
            except NotComputed:
                continue
            seen.add(dtype)
            yield ProductReading(dtype.name, *place, *sides)


def _dtype_of(file: GGUFFile, place: PointPlace) -> DType | None:
    """The type of the matrix of a point that is one product; None of others."""
    name, layer = place
    tensor = f"blk.{layer}.{_MATRICES[name]}.weight" if name in _MATRICES else ""
    if name == "logits":
        tensor = head_of(file)
    return file.tensors[tensor].dtype if tensor in file.tensors else None


def _side(judge: Float64Steps, step: TracedStep, place: PointPlace) -> SideReading:
    off = judge.error(step, *place)
    if off <= ROUNDING:
        return SideReading(off, "f32", off)
    by_form = {form: judge.error(step, *place, reading) for form, reading in FORMS.items()}
    form = min(by_form, key=lambda each: by_form[each])
    is_explained = by_form[form] * _NEARER < off
    return SideReading(off, form if is_explained else "", by_form[form] if is_explained else off)


def _codes(
    num_columns: int, scale_of: Callable[[Float32s], tuple[Float32s, Float32s]]
) -> InputForm:
    """Codes of so many columns that share a scale, by the factor that makes codes and the scale
    that is multiplied back, which `scale_of` gives of the values of largest size."""

    def reading(x: Float64s) -> Float64s:
        groups = np.zeros((len(x), -(-x.shape[1] // num_columns), num_columns), np.float32)
        flat = groups.reshape(len(x), -1)
        flat[:, : x.shape[1]] = x
        largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor, scale = scale_of(largest)
            codes = np.rint(groups * factor)
            values = np.where(largest == 0, 0, np.minimum(codes, 127).astype(np.float64) * scale)
        return values.reshape(flat.shape)[:, : x.shape[1]]

    return reading


def _ggml_q8_0(largest: Float32s) -> tuple[Float32s, Float32s]:
    size = np.abs(largest)
    scale = np.divide(size, 127, dtype=np.float32).astype(np.float16).astype(np.float32)
    return np.divide(127, size, dtype=np.float32), scale


def _ggml_q8_k(largest: Float32s) -> tuple[Float32s, Float32s]:
    factor: Float32s = np.divide(-127, largest, dtype=np.float32)
    return factor, np.divide(1, factor, dtype=np.float32)


def _four_bits(largest: Float32s) -> tuple[Float32s, Float32s]:
    bits = (np.abs(largest) * np.float32(1 / 127)).view(np.int32)
    scale = ((bits + np.int32(0xFFFFF)) & np.int32(-0x100000)).view(np.float32)
    return np.divide(1, scale, dtype=np.float32), scale


def _as_f16(x: Float64s) -> Float64s:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float64)


def _as_bf16(x: Float64s) -> Float64s:
    return bf16_to_f32(f32_to_bf16(x.astype(np.float32))).astype(np.float64)


#: By the words of a report.
FORMS: dict[str, InputForm] = {
    "f16": _as_f16,
    "bf16": _as_bf16,
    "8-bit codes with an f16 scale per 32 columns": _codes(32, _ggml_q8_0),
    "8-bit codes with an f32 scale per 256 columns": _codes(256, _ggml_q8_k),
    "8-bit codes with a scale of four bits per 32 columns": _codes(32, _four_bits),
}
