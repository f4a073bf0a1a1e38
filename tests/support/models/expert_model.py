"""Writes a small random qwen3moe or gpt-oss model whose matrices are of any type, never trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from ops.kernel_launch import SCALE_FIELDS, random_rows

from hypocenter.base.tensor import DType
from hypocenter.model.gguf.file import open_gguf

WIDTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 256, 4, 2, 64
NUM_EXPERTS, NUM_USED, EXPERT_WIDTH, VOCAB_SIZE = 8, 3, 256, 512
#: Of every other layer of gpt-oss.
WINDOW = 20


def write_experts(
    path: Path,
    kind: DType,
    *,
    arch: str = "qwen3moe",
    kinds: Mapping[str, DType] | None = None,
    num_layers: int = 2,
    metadata: Mapping[str, int | None] | None = None,
    shapes: Mapping[str, tuple[int, ...] | None] | None = None,
    nan_row: int | None = None,
) -> Path:
    """Matrices are of type `kind`, but for those whose names end as a key of `kinds` says.

    `metadata` and `shapes` replace keys, without the architecture's prefix, and shapes of tensors;
    what is None is left out. `nan_row` is a token whose embedding is no number.
    """
    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, Any] = {
        "block_count": num_layers,
        "context_length": 2048,
        "embedding_length": WIDTH,
        "feed_forward_length": 1024,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": NUM_KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "expert_count": NUM_EXPERTS,
        "expert_used_count": NUM_USED,
        "expert_feed_forward_length": EXPERT_WIDTH,
        **({"attention.sliding_window": WINDOW} if arch == "gpt-oss" else {}),
        **(metadata or {}),
    }
    for key, value in keys.items():
        if value is None:
            continue
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    for seed, (name, shape) in enumerate((_shapes(arch, num_layers) | dict(shapes or {})).items()):
        if shape is None:
            continue
        ends = (own for end, own in (kinds or {}).items() if name.endswith(end))
        bad_row = nan_row if name == "token_embd.weight" else None
        _add(writer, name, shape, next(ends, kind), seed, bad_row)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_with_factors(
    path: Path, names: Sequence[str], shapes: Mapping[str, tuple[int, ...] | None]
) -> Path:
    """The model of NVFP4 that `write_experts` makes of `shapes`, but for these weights of layer 1,
    whose scales are twice as large beside a factor of a half: the same numbers."""
    counts = {f"blk.1.{name}": NUM_EXPERTS if "exps" in name else 1 for name in names}
    beside = {f"{name}.scale": (count,) for name, count in counts.items()}
    write_experts(path, DType.NVFP4, shapes={**shapes, **beside})
    data = np.fromfile(path, np.uint8)
    with open_gguf(path) as file:
        for name, count in counts.items():
            weight, factor = file.tensors[f"{name}.weight"], file.tensors[f"{name}.scale"]
            blocks = data[weight.offset : weight.offset + weight.num_bytes].reshape(-1, 36)
            scales = blocks[:, :4]
            scales[:] = np.where(scales < 8, 2 * scales, scales + 8)
            data[factor.offset :][: 4 * count] = np.full(count, 0.5, np.float32).view(np.uint8)
    data.tofile(path)
    return path


def _shapes(arch: str, num_layers: int) -> dict[str, tuple[int, ...] | None]:
    heads, kv_heads = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (WIDTH,),
        "attn_q": (heads, WIDTH),
        "attn_k": (kv_heads, WIDTH),
        "attn_v": (kv_heads, WIDTH),
        "attn_q_norm": (HEAD_DIM,),
        "attn_k_norm": (HEAD_DIM,),
        "attn_output": (WIDTH, heads),
        "ffn_norm": (WIDTH,),
        "ffn_gate_inp": (NUM_EXPERTS, WIDTH),
        "ffn_gate_exps": (NUM_EXPERTS, EXPERT_WIDTH, WIDTH),
        "ffn_up_exps": (NUM_EXPERTS, EXPERT_WIDTH, WIDTH),
        "ffn_down_exps": (NUM_EXPERTS, WIDTH, EXPERT_WIDTH),
    }
    biases: dict[str, tuple[int, ...]] = {}
    if arch == "gpt-oss":
        for name in ("attn_q_norm", "attn_k_norm", "ffn_norm"):
            del layer[name]
        biases = {name: shape[:-1] for name, shape in layer.items() if len(shape) > 1}
        layer |= {"post_attention_norm": (WIDTH,), "attn_sinks": (NUM_HEADS,)}
    shapes: dict[str, tuple[int, ...] | None] = {"token_embd.weight": (VOCAB_SIZE, WIDTH)}
    shapes["output_norm.weight"] = (WIDTH,)
    for index in range(num_layers):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes |= {f"blk.{index}.{name}.bias": shape for name, shape in biases.items()}
    return shapes


def _add(
    writer: Any, name: str, shape: tuple[int, ...], kind: DType, seed: int, bad_row: int | None
) -> None:
    random = np.random.default_rng(seed)
    is_bias = name.endswith(".bias")
    if len(shape) == 1 or "ffn_gate_inp" in name or is_bias or not kind.is_quantised:
        gain = 1 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        values = random.uniform(0.5, 1.5, shape) if gain == 1 else random.normal(0, gain, shape)
        if bad_row is not None:
            values[bad_row] = np.nan
        is_half = kind is DType.F16 and len(shape) > 1 and not is_bias
        writer.add_tensor(name, values.astype(np.float16 if is_half else np.float32))
        return
    raw = random_rows(kind, int(np.prod(shape[:-1])), shape[-1], seed)
    blocks = raw.reshape(len(raw), -1, kind.block_bytes).copy()
    if kind is DType.MXFP4:
        blocks[..., 0] -= 8
    if kind is DType.NVFP4:
        blocks[..., :4] = blocks[..., :4] // 4 + 1
    for offset in SCALE_FIELDS.get(kind, ()):  # so that numbers are about as large as a model's
        field = blocks[..., offset : offset + 2]
        scales = np.ascontiguousarray(field).view(np.float16) * np.float16(2.0**-10)
        blocks[..., offset : offset + 2] = scales.view(np.uint8)
    raw = blocks.reshape(*shape[:-1], -1)
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind.name])
