"""Writes a random llama or qwen3moe model that is not quantised, and importance matrices of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np

from models.family_gguf import add_vocabulary
from models.family_table import VOCAB_SIZE

NUM_HEADS, HEAD_DIM = 4, 64
WIDTH = NUM_HEADS * HEAD_DIM
DATASET, NUM_CHUNKS = "a text to measure on", 12


def write_unquantised(
    path: Path,
    *,
    num_layers: int = 2,
    num_experts: int = 0,
    num_kv_heads: int = 2,
    ffn_width: int = 512,
    kind: str = "F16",
    is_tied: bool = False,
    vocab_size: int = VOCAB_SIZE,
    changed: Mapping[str, np.ndarray] | None = None,
    split: int = 1,
) -> Path:
    """Matrices in F32, F16 or BF16, vectors in F32. `num_experts`: of a qwen3moe, 0 for a llama.

    `changed` are f32 tensors in place of random ones. `split`: into how many files. The numbers are
    those of numpy's RandomState, which never changes.
    """
    arch = "qwen3moe" if num_experts else "llama"
    shapes = shapes_of(
        num_layers=num_layers,
        num_experts=num_experts,
        num_kv_heads=num_kv_heads,
        ffn_width=ffn_width,
        is_tied=is_tied,
        vocab_size=vocab_size,
    )
    most = -(-len(shapes) // split) if split > 1 else 0
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=most)
    keys = {
        "block_count": num_layers,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": ffn_width,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": num_kv_heads,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
    }
    if num_experts:
        keys |= {
            "expert_count": num_experts,
            "expert_used_count": 2,
            "expert_feed_forward_length": ffn_width,
        }
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("general.file_type", 1)
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_bool("test.flag", True)
    add_vocabulary(writer, "gpt2", "gpt-2")
    draw = np.random.RandomState(7)
    for name, shape in shapes.items():
        values = draw.standard_normal(shape).astype(np.float32) * np.float32(0.05)
        if len(shape) == 1:
            values = np.ones(shape, np.float32) + values
        values = (changed or {}).get(name, values)
        if len(shape) == 1 or kind == "F32":
            writer.add_tensor(name, values)
        elif kind == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if split == 1 else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*"))))


def shapes_of(
    *,
    num_layers: int = 2,
    num_experts: int = 0,
    num_kv_heads: int = 2,
    ffn_width: int = 512,
    is_tied: bool = False,
    vocab_size: int = VOCAB_SIZE,
) -> dict[str, tuple[int, ...]]:
    """What `write_unquantised` writes."""
    shapes = dict(_shapes(num_layers, num_experts, num_kv_heads, ffn_width, vocab_size))
    if is_tied:
        del shapes["output.weight"]
    return shapes


def _shapes(
    num_layers: int, num_experts: int, num_kv: int, ffn: int, vocab_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (vocab_size, WIDTH)
    for layer in range(num_layers):
        head = f"blk.{layer}"
        yield f"{head}.attn_norm.weight", (WIDTH,)
        yield f"{head}.attn_q.weight", (WIDTH, WIDTH)
        yield f"{head}.attn_k.weight", (num_kv * HEAD_DIM, WIDTH)
        yield f"{head}.attn_v.weight", (num_kv * HEAD_DIM, WIDTH)
        yield f"{head}.attn_output.weight", (WIDTH, WIDTH)
        yield f"{head}.ffn_norm.weight", (WIDTH,)
        if not num_experts:
            yield f"{head}.ffn_gate.weight", (ffn, WIDTH)
            yield f"{head}.ffn_up.weight", (ffn, WIDTH)
            yield f"{head}.ffn_down.weight", (WIDTH, ffn)
            continue
        yield f"{head}.attn_q_norm.weight", (HEAD_DIM,)
        yield f"{head}.attn_k_norm.weight", (HEAD_DIM,)
        yield f"{head}.ffn_gate_inp.weight", (num_experts, WIDTH)
        yield f"{head}.ffn_gate_exps.weight", (num_experts, ffn, WIDTH)
        yield f"{head}.ffn_up_exps.weight", (num_experts, ffn, WIDTH)
        yield f"{head}.ffn_down_exps.weight", (num_experts, WIDTH, ffn)
    yield "output_norm.weight", (WIDTH,)
    yield "output.weight", (vocab_size, WIDTH)


def importance_of(model: Path) -> dict[str, np.ndarray]:
    """Sums of squares f32 [num_matrices, num_columns] for each matrix but the embedding."""
    draw = np.random.RandomState(11)
    found = {}
    for tensor in gguf.GGUFReader(model).tensors:
        shape = tuple(int(size) for size in tensor.shape[::-1])
        if len(shape) > 1 and tensor.name != "token_embd.weight" and "_inp" not in tensor.name:
            num = shape[0] if len(shape) == 3 else 1
            sizes = 10.0 ** draw.uniform(-3, 1, (num, shape[-1]))
            found[tensor.name] = sizes.astype(np.float32)
    return found


def write_imatrix(path: Path, sums: Mapping[str, np.ndarray]) -> Path:
    """As llama-imatrix writes it, GGUF or by its name .dat; the last expert has seen nothing."""
    if path.suffix == ".dat":
        parts = [struct.pack("<i", len(sums))]
        for name, values in sums.items():
            raw = name.encode()
            parts.append(struct.pack("<i", len(raw)) + raw)
            parts.append(struct.pack("<ii", 7, values.size) + values.astype("<f4").tobytes())
        raw = DATASET.encode()
        parts.append(struct.pack("<ii", NUM_CHUNKS, len(raw)) + raw)
        path.write_bytes(b"".join(parts))
        return path
    writer = gguf.GGUFWriter(path, "")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", [DATASET])
    writer.add_uint32("imatrix.chunk_count", NUM_CHUNKS)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in sums.items():
        counts = np.full((len(values), 1), 37, np.float32)
        if len(values) > 1:
            counts[-1] = 0
        writer.add_tensor(f"{name}.in_sum2", values)
        writer.add_tensor(f"{name}.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
