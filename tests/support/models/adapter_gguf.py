"""Writes LoRA adapters in GGUF for small models, and models into which adapters are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from models.gguf_edit import Tensors, rewritten

#: Of a matrix [n, k]: A [rank, k], and B [n, rank]; of a stack of experts as many of each.
Pair = tuple[np.ndarray, np.ndarray]
TOKEN_TABLE = "token_embd.weight"


def adapted_matrices(base: Path) -> dict[str, tuple[int, ...]]:
    """The matrices of a model that adapters stand beside, with their shapes [n, k], and stacks of
    experts [num_experts, n, k]."""
    skipped: tuple[str, ...]
    skipped = "token_embd", "norm", "ffn_gate_inp", "attn_k_b", "attn_v_b", "attn_kv_b"
    skipped += "conv", "per_layer_token_embd", "ssm_a", "ssm_d"
    return {
        tensor.name: tuple(int(length) for length in reversed(tensor.shape))
        for tensor in gguf.GGUFReader(base).tensors
        if (len(tensor.shape) == 2 or "_exps" in tensor.name)
        and tensor.name.endswith(".weight")
        and not any(part in tensor.name for part in skipped)
    }


def random_pairs(base: Path, rank: int, seed: int, size: float = 0.5) -> dict[str, Pair]:
    """One beside each such matrix, which changes it by about `size` of what random rows have."""
    rng, pairs = np.random.default_rng(seed), {}
    for name, (*lead, num_rows, num_columns) in adapted_matrices(base).items():
        down = rng.standard_normal((*lead, rank, num_columns)) / np.sqrt(num_columns)
        up = size * rng.standard_normal((*lead, num_rows, rank)) / np.sqrt(rank)
        pairs[name] = down.astype(np.float32), up.astype(np.float32)
    return pairs


def write_adapter(
    path: Path,
    base: Path,
    pairs: Mapping[str, Pair],
    *,
    alpha: float | None = 16.0,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors,
    keys: Mapping[str, Any] | None = None,
) -> Path:
    """A file as llama.cpp's converter writes it; `change` has the last word of its tensors, and
    `keys` that of its texts (None: left out)."""
    arch = gguf.GGUFReader(base).fields["general.architecture"].contents()
    texts = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": arch}
    texts |= keys or {}
    writer = gguf.GGUFWriter(path, str(texts.pop("general.architecture")))
    for key, value in texts.items():
        if value is not None:
            writer.add_string(key, value)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    tensors: Tensors = {}
    for name, (down, up) in pairs.items():
        tensors |= {f"{name}.lora_a": down, f"{name}.lora_b": up}
    for name, values in change(tensors).items():
        if kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        else:
            writer.add_tensor(name, quantize(np.float32(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_adapter(
    path: Path, base: Path, *, rank: int = 4, seed: int = 1, size: float = 0.5, **more: Any
) -> Path:
    """An adapter beside every matrix of a model."""
    return write_adapter(path, base, random_pairs(base, rank, seed, size), **more)


def merged(path: Path, base: Path, adapters: Sequence[tuple[Mapping[str, Pair], float]]) -> Path:
    """The model in f32 with `factor` B A added to its matrices, summed in float64."""

    def add(tensors: Tensors) -> Tensors:
        for pairs, factor in adapters:
            for name, (down, up) in pairs.items():
                left, right = (down, up.T) if name == TOKEN_TABLE else (up, down)
                delta = factor * (left.astype(np.float64) @ right.astype(np.float64))
                tensors[name] = (tensors[name] + delta).astype(np.float32)
        return tensors

    return rewritten(base, path, add)


def read_pairs(path: Path) -> dict[str, Pair]:
    """The pairs of an adapter as its file has them."""
    found = {
        tensor.name: np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        for tensor in gguf.GGUFReader(path).tensors
    }
    names = [name.removesuffix(".lora_a") for name in found if name.endswith(".lora_a")]
    return {name: (found[f"{name}.lora_a"], found[f"{name}.lora_b"]) for name in names}


def with_token_table(
    base: Path, pairs: Mapping[str, Pair], rank: int, seed: int
) -> dict[str, Pair]:
    """The same with a pair beside the token table: A [vocab_size, rank], and B [width, rank]."""
    shapes = {tensor.name: tensor.shape for tensor in gguf.GGUFReader(base).tensors}
    width, num_tokens = (int(count) for count in shapes[TOKEN_TABLE])
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((num_tokens, rank)).astype(np.float32)
    up = (0.3 * rng.standard_normal((width, rank)) / np.sqrt(rank)).astype(np.float32)
    return {**pairs, TOKEN_TABLE: (rows, up)}
