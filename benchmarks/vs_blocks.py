"""GGUF files of random blocks, written at the disk's speed, for where speed alone counts.

A quantiser needs minutes for what an 8B model has. Reads no model and runs none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from ops.kernel_launch import SCALE_FIELDS, random_rows
from vs_models import (
    SEED,
    Shape,
    digest,
    opened,
    require_disk,
    tensors_of,
    values_of,
    write_head,
    written_whole,
)

from hypocenter.base.tensor import DType

#: Different rows of a matrix.
TILE_ROWS = 64

Array = np.ndarray[Any, Any]


def made_of_blocks(shape: Shape, kind: str, folder: Path) -> Path:
    """A file of type `kind` whose matrices repeat a few random rows: seconds, and no quantiser.

    Its tensors have the types that llama.cpp's quantiser gives them; its answers mean nothing.
    """
    path = folder / f"{shape.name}-{digest(shape)}-blocks-{kind}.gguf"
    if not path.exists():
        require_disk(folder, 2 * shape.num_weights)
        with written_whole(path) as partial:
            _write_blocks(shape, kind, partial)
    return path


def _write_blocks(shape: Shape, kind: str, path: Path) -> None:
    writer = opened(shape, path, gguf.LlamaFileType[f"MOSTLY_{kind}"])
    tensors, tiles = list(tensors_of(shape)), {}
    for name, sizes, scale in tensors:
        if not _is_of_blocks(name, sizes):
            num_bytes = 4 * int(np.prod(sizes))
            writer.add_tensor_info(name, sizes, np.dtype(np.float32), num_bytes)
            continue
        dtype = _block_type(kind, name, shape.num_layers)
        key = (dtype, sizes[-1], scale)
        if key not in tiles:
            tiles[key] = _tile(dtype, sizes[-1], scale)
        in_bytes = (*sizes[:-1], tiles[key].shape[1])
        writer.add_tensor_info(
            name, in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)),
            gguf.GGMLQuantizationType[dtype.name],
        )  # fmt: skip
    write_head(writer)
    for name, sizes, scale in tensors:
        if _is_of_blocks(name, sizes):
            tile = tiles[_block_type(kind, name, shape.num_layers), sizes[-1], scale]
            writer.write_tensor_data(np.resize(tile, (*sizes[:-1], tile.shape[1])))
        else:
            writer.write_tensor_data(values_of(shape, name, sizes, scale))
    writer.close()


def _is_of_blocks(name: str, sizes: tuple[int, ...]) -> bool:
    """A matrix, but for a router; biases of experts have two axes as well."""
    return len(sizes) > 1 and name.endswith(".weight") and "ffn_gate_inp" not in name


def _block_type(kind: str, name: str, num_layers: int) -> DType:
    """As llama.cpp's `llama_tensor_get_type` chooses, but for models of eight experts."""
    if kind in ("F16", "Q8_0"):
        return DType[kind]
    if kind == "MXFP4_MOE":
        return DType.MXFP4 if "_exps" in name else DType.Q8_0
    if name == "output.weight":
        return DType.Q6_K
    if kind == "Q4_K_M":
        part = name.split(".")[2] if name.startswith("blk.") else ""
        layer, eighth = int(name.split(".")[1]) if part else 0, num_layers // 8
        is_outer = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
        is_finer = part in ("attn_v", "ffn_down", "ffn_down_exps") and is_outer
        return DType.Q6_K if is_finer else DType.Q4_K
    return DType[kind]


def _tile(dtype: DType, num_columns: int, scale: float) -> Array:
    """uint8 [TILE_ROWS, row_bytes] of random values whose standard deviation is `scale`."""
    if dtype is DType.F16:
        values = np.random.default_rng(SEED).standard_normal((TILE_ROWS, num_columns)) * scale
        return values.astype(np.float16).view(np.uint8)
    rows = random_rows(dtype, TILE_ROWS, num_columns, SEED)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[dtype.name])
    blocks = rows.reshape(TILE_ROWS, -1, dtype.block_bytes)
    if dtype is DType.MXFP4:  # the first byte is an exponent of two
        blocks[..., 0] += np.round(np.log2(scale / values.std())).astype(np.int8).view(np.uint8)
    for offset in SCALE_FIELDS.get(dtype, ()):
        scales = np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)
        smaller = (scales * np.float32(scale / values.std())).astype(np.float16)
        blocks[..., offset : offset + 2] = smaller.view(np.uint8)
    return rows
