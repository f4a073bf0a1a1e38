"""The bundled model in the types that Q4_K_M has: blocks of 256 numbers in 4 and 6 bits.

Scales are the plain ones, from the ends of each group, with no search for better ones: what is
tested is how such blocks are read, and `gguf` itself decodes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize
from repository import DEMO

Array = np.ndarray[Any, Any]
BLOCK = 256
_FILE_TYPES = {
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
}
_Q4_K, _Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K


def quantize_q4_k(rows: Array) -> Array:
    """uint8[rows, bytes]: eight groups of 32 numbers a block, each with a scale and a minimum."""
    groups = rows.astype(np.float32).reshape(-1, 8, 32)
    low = np.minimum(groups.min(2), 0.0)
    step = (groups.max(2).clip(min=0.0) - low) / 15
    d, codes = _codes(step, 63)
    dmin, minima = _codes(-low, 63)
    size = d[:, None] * codes
    shifted = groups + (dmin[:, None] * minima)[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = np.where(size[:, :, None] > 0, np.rint(shifted / size[:, :, None]), 0)
    numbers = numbers.clip(0, 15).astype(np.uint8)
    packed = np.concatenate(
        [
            codes[:, :4] | codes[:, 4:] >> 4 << 6,
            minima[:, :4] | minima[:, 4:] >> 4 << 6,
            codes[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    pairs = numbers.reshape(-1, 4, 2, 32)
    halves = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    ends = np.stack([d, dmin], axis=1).astype(np.float16).view(np.uint8)
    return np.concatenate([ends, packed, halves], axis=1).reshape(len(rows), -1)


def quantize_q6_k(rows: Array) -> Array:
    """uint8[rows, bytes]: sixteen groups of 16 numbers a block, each with a scale of 8 bits."""
    groups = rows.astype(np.float32).reshape(-1, 16, 16)
    d, codes = _codes(np.abs(groups).max(2) / 31, 127)
    size = (d[:, None] * codes)[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = np.where(size > 0, np.rint(groups / size), 0)
    numbers = (numbers.clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    # Of each 128 numbers: the low four bits of the first 64 beside those of the last 64.
    low = numbers & 15
    low = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], 2)
    high = sum(numbers[:, :, which] >> 4 << 2 * which for which in range(4))
    parts = [low.reshape(-1, 128), np.asarray(high, np.uint8).reshape(-1, 64), codes]
    ends = d.astype(np.float16)[:, None].view(np.uint8)
    return np.concatenate([*parts, ends], axis=1).reshape(len(rows), -1)


def _codes(steps: Array, most: int) -> tuple[Array, Array]:
    """A factor for each block, as float16 has it, and each group's step in multiples of it."""
    d = (steps.max(1) / most).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(d[:, None] > 0, np.rint(steps / d[:, None]), 0)
    return d, codes.clip(0, most).astype(np.uint8)


def type_in_q4_k_m(name: str, num_layers: int) -> GGMLQuantizationType:
    """Which type llama.cpp's mixture gives a matrix: six bits where errors count most."""
    if name in ("token_embd.weight", "output.weight"):
        return _Q6_K
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer = int(name.split(".")[1])
        first, last = num_layers // 8, 7 * num_layers // 8
        if layer < first or layer >= last or (layer - first) % 3 == 2:
            return _Q6_K
    return _Q4_K


def demo_of_type(path: Path, kind: str) -> Path:
    """Write the bundled model with its matrices as `kind`: F16, Q8_0 or Q4_K_M."""
    reader = GGUFReader(DEMO)
    writer = GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            gguf.Keys.General.ARCHITECTURE,
            gguf.Keys.General.FILE_TYPE,
        ):
            continue
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(_FILE_TYPES[kind])
    num_layers = int(reader.fields["llama.block_count"].contents())
    for tensor in reader.tensors:
        data, held = tensor.data, tensor.tensor_type
        if held == GGMLQuantizationType.Q8_0 and kind != "Q8_0":
            rows = dequantize(data, held)
            held = GGMLQuantizationType.F16
            if kind == "Q4_K_M":
                held = type_in_q4_k_m(tensor.name, num_layers)
            makers = {_Q4_K: quantize_q4_k, _Q6_K: quantize_q6_k}
            data = makers[held](rows) if held in makers else quantize(rows, held)
        writer.add_tensor(tensor.name, data, raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
