"""Writes a whole model of one layer and a few columns, sound but for what a test asks to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from hypocenter.model.facts.families import FAMILIES

WIDTH, NUM_HEADS, NUM_KV_HEADS, FFN_WIDTH, VOCAB_SIZE = 20, 2, 1, 22, 7
HEAD_DIM = WIDTH // NUM_HEADS


def write_tiny(
    path: Path,
    name: str = "llama",
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    num_layers: int = 1,
    tokens: Sequence[str] = (),
    in_f16: bool = False,
) -> Path:
    """A random model of the architecture `name`, in F32 or with matrices in F16.

    `metadata` adds or replaces keys, without the architecture's prefix: text, integers (u32),
    floats (f64) or lists of these. `tensors` adds or replaces tensors. None leaves one out.
    `tokens` are the words of its tokenizer, which it has none of without.
    """
    writer = gguf.GGUFWriter(path, name)
    keys: dict[str, Any] = {
        "block_count": num_layers,
        "context_length": 64,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN_WIDTH,
        "attention.head_count": NUM_HEADS,
        "attention.head_count_kv": NUM_KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        **(metadata or {}),
    }
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float64,
    }
    for key, value in keys.items():
        if value is None:
            continue
        add.get(type(value), writer.add_array)(f"{name}.{key}", value)
    if tokens:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(list(tokens))
        writer.add_token_scores([0.0] * len(tokens))
    for tensor, values in {**_tensors(name, num_layers), **(tensors or {})}.items():
        if values is not None:
            is_half = in_f16 and np.ndim(values) == 2
            writer.add_tensor(tensor, np.asarray(values, np.float16 if is_half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(name: str, num_layers: int) -> dict[str, np.ndarray]:
    q_rows, kv_rows = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (WIDTH,),
        "attn_output": (WIDTH, q_rows),
        "ffn_norm": (WIDTH,),
        "ffn_down": (WIDTH, FFN_WIDTH),
    }
    if name == "phi3":
        layer |= {"attn_qkv": (q_rows + 2 * kv_rows, WIDTH), "ffn_up": (2 * FFN_WIDTH, WIDTH)}
    else:
        layer |= {"attn_q": (q_rows, WIDTH), "attn_k": (kv_rows, WIDTH), "attn_v": (kv_rows, WIDTH)}
        layer |= {"ffn_gate": (FFN_WIDTH, WIDTH), "ffn_up": (FFN_WIDTH, WIDTH)}
    family = FAMILIES.get(name, FAMILIES["llama"])  # of what is not run nothing else is read
    if family.post_norms:
        layer |= {"post_attention_norm": (WIDTH,), "post_ffw_norm": (WIDTH,)}
    if not family.has_gate:
        del layer["ffn_gate"]
    if not family.ffn_norm:
        del layer["ffn_norm"]
    if not family.pre_norms:
        del layer["attn_norm"], layer["ffn_norm"]
    # The smaller ones of those with a norm for each head have none.
    if (family.qk_norm or family.wide_qk_norm) and not family.norms_by_head:
        is_wide = family.wide_qk_norm
        layer["attn_q_norm"] = (q_rows if is_wide else HEAD_DIM,)
        layer["attn_k_norm"] = (kv_rows if is_wide else HEAD_DIM,)
    shapes = {"token_embd.weight": (VOCAB_SIZE, WIDTH), "output_norm.weight": (WIDTH,)}
    for index in range(num_layers):
        shapes |= {f"blk.{index}.{part}.weight": shape for part, shape in layer.items()}
    generator = np.random.default_rng(0)
    return {
        tensor: generator.uniform(0.5, 1.0, shape) / shape[-1] ** 0.5
        for tensor, shape in shapes.items()
    }
