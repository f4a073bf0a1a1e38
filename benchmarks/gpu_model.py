"""An 8B Llama's shape with random weights, made on the device: nothing so large is copied there.

Measures nothing; `gpu_speed.py` does.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from ops.kernel_launch import random_rows

from hypocenter.base.tensor import Allocation, DType, Tensor, contiguous_strides
from hypocenter.device import copies, devices, memory
from hypocenter.kernels.attention import rope
from hypocenter.kernels.weights import packing
from hypocenter.kernels.weights.gpu_layout import UNITS
from hypocenter.kernels.weights.row_groups import ROWS_PER_ITEM, padded_rows

_ids = itertools.count(1 << 32)
_KINDS = {
    "torch.float32": DType.F32,
    "torch.float16": DType.F16,
    "torch.bfloat16": DType.BF16,
    "torch.int16": DType.I16,
    "torch.int32": DType.I32,
    "torch.uint8": DType.U8,
}


def llama_8b(context: int) -> Any:
    """The shape of Llama 3.1 8B: its config.json, without its long-context scaling."""
    from hypocenter.model.facts.architecture import Architecture, Rope
    from hypocenter.model.facts.families import FAMILIES
    from hypocenter.model.facts.layer_shapes import LayerShape

    turns = Rope(base=500000.0, dim=128)
    return Architecture(
        name="llama", family=FAMILIES["llama"], layers=(LayerShape(8, 128, 14336),) * 32,
        width=4096, num_heads=32, vocab_size=128256, context_length=context, norm_eps=1e-5,
        rope=turns, local_rope=turns, attn_scale=128**-0.5, attn_softcap=0.0, final_softcap=0.0,
    )  # fmt: skip


def large_weights(facts: Any, dtype: DType, context: int, device: str) -> tuple[Any, int]:
    """Weights of that shape, made on the device, and the bytes of them that a step reads."""
    from hypocenter.model.tensors.rope_tables import RopeTables
    from hypocenter.model.tensors.table import FeedForward, LayerWeights, Weights

    num_bytes = 0

    def matrix(num_rows: int, num_columns: int) -> Tensor:
        nonlocal num_bytes
        made = large_weight(dtype, num_rows, num_columns, device)
        num_bytes += made.allocation.num_bytes
        return made

    def vector(name: str, values: np.ndarray[Any, Any]) -> Tensor:
        made = memory.allocate(name, "model", DType.F32, values.shape, device=device)
        copies.to_device(made, values)
        return made

    width, ffn, kv = facts.width, facts.layers[0].ffn_width, facts.layers[0].kv_width
    ones = vector("norm", np.ones(width, np.float32))
    given: dict[str, Any] = {"attn_norm": ones, "ffn_norm": ones}
    shapes = {
        "q": (width, width), "k": (kv, width), "v": (kv, width), "attn_output": (width, width),
    }  # fmt: skip
    of_dense = {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
    made = {*given, *shapes, "dense", "scale"}
    absent = [name for name in LayerWeights.__dataclass_fields__ if name not in made]
    layers = tuple(
        LayerWeights(
            **given | dict.fromkeys(absent) | {n: matrix(*shape) for n, shape in shapes.items()},
            dense=FeedForward(
                **{name: matrix(*shape) for name, shape in of_dense.items()}, gate_up=None
            ),
        )
        for _ in range(facts.num_layers)
    )
    output = matrix(facts.vocab_size, width)
    read = num_bytes
    table = matrix(facts.vocab_size, width)  # of which a step reads one row
    cos, sin = rope.tables(context, facts.rope.dim, facts.rope.base)
    turns = (vector("cos", cos), vector("sin", sin))
    return Weights(table, layers, ones, output, RopeTables(turns, turns), num_bytes), read


def large_weight(dtype: DType, num_rows: int, num_columns: int, device: str) -> Tensor:
    """A packed weight filled on the device with copies of a small random one.

    Whatever the packed layout is, it must hold its rows in order of tiles of 64.
    """
    backend = devices.backend_of(device)
    raw = _scaled_rows(dtype, ROWS_PER_ITEM, num_columns)
    sample = _small_scales(packing.pack(raw, dtype, num_columns, device=device, on_host=True))
    small = packing.place("sample", "benchmark", sample, device=device)
    num_tiles = padded_rows(num_rows) // ROWS_PER_ITEM
    parts: list[Any] = []
    sizes = [p.num_bytes if isinstance(p, memory.PackedArray) else 0 for p in small.data.parts]
    starts = [0, *itertools.accumulate(-(-size * num_tiles // 256) * 256 for size in sizes)]
    address = backend.allocate(starts[-1])
    for part, start in zip(small.data.parts, starts, strict=False):
        if not isinstance(part, memory.PackedArray):
            parts.append(part)
            continue
        source = part.argument
        kind = _KINDS[str(source.dtype)]
        view = backend.argument(address + start, kind, source.numel() * num_tiles)
        if source.numel():
            view.view(num_tiles, -1).copy_(source)
        parts.append(memory.PackedArray(view, part.num_bytes * num_tiles))
    backend.free(small.allocation.address)
    allocation = Allocation(next(_ids), device, starts[-1], "benchmarks", address)
    shape = (num_rows, num_columns)
    data = replace(small.data, parts=tuple(parts), num_rows=num_rows)
    return Tensor(
        "weight", "model", dtype, shape, contiguous_strides(shape), 0, allocation, data
    )  # fmt: skip


def _small_scales(packed: packing.Packed) -> packing.Packed:
    """The same codes with scales and minima that make a product about as large as its input."""
    layout = UNITS[packed.dtype]
    if layout.is_float:
        return packed
    factor = packed.num_columns**-0.5 / (4 if layout.codes_per_word == 8 else 64)

    def smaller(part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if part.dtype == np.float16:
            return part * np.float16(factor)
        return part * np.float32(factor)

    words, scales, minima, *numbers = packed.parts
    return replace(packed, parts=(words, smaller(scales), smaller(minima), *numbers))


def _scaled_rows(dtype: DType, num_rows: int, num_columns: int) -> np.ndarray[Any, Any]:
    """GGUF bytes of random weights; those of block types have scales of up to 1."""
    if dtype is DType.F16:
        rng = np.random.default_rng(num_columns)
        values = rng.standard_normal((num_rows, num_columns)) * num_columns**-0.5
        halves: np.ndarray[Any, Any] = values.astype(np.float16)
        return halves.view(np.uint8)
    return random_rows(dtype, num_rows, num_columns)
