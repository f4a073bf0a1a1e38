"""Writes the trained demo model as a GGUF file with F16 matrices and F32 norms; quantises nothing.

The llama architecture of GGUF rotates neighbours (`x[2i]`, `x[2i + 1]`), the training code rotates
halves, so the rows of q and k are reordered within each head. Needs no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cyclopts
import gguf
import numpy as np
from safetensors import safe_open

from tools.demo_model.recipe import Recipe

NAME = "hypocenter demo: 6M-parameter Llama trained on the CPython standard library"
LICENCE = "Apache-2.0; training text: CPython standard library, PSF-2.0"
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NORMS = ("attn_norm", "ffn_norm")


def interleave(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [num_heads * head_dim, width] from halves to neighbours: 0, h/2, 1, h/2 + 1, ..."""
    halves = matrix.reshape(num_heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def export(checkpoint: Path, tokenizer: Path, output: Path) -> None:
    """Write `output` from model.safetensors and tokenizer.json as `train.build` leaves them."""
    with safe_open(checkpoint, framework="numpy") as file:
        recipe = Recipe.from_json(file.metadata()["recipe"])
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    writer = gguf.GGUFWriter(output, "llama")
    _add_facts(writer, recipe)
    _add_tokenizer(writer, json.loads(tokenizer.read_text("utf-8")))
    writer.add_tensor("token_embd.weight", state["token_embd.weight"].astype(np.float16))
    for layer in range(recipe.num_layers):
        prefix = f"blk.{layer}"
        for name in NORMS:
            writer.add_tensor(f"{prefix}.{name}.weight", state[f"{prefix}.{name}"])
        for name in MATRICES:
            matrix = state[f"{prefix}.{name}.weight"]
            if name in ("attn_q", "attn_k"):
                matrix = interleave(matrix, matrix.shape[0] // recipe.head_dim)
            writer.add_tensor(f"{prefix}.{name}.weight", matrix.astype(np.float16))
    writer.add_tensor("output_norm.weight", state["output_norm"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_facts(writer: gguf.GGUFWriter, recipe: Recipe) -> None:
    writer.add_name(NAME)
    writer.add_license(LICENCE)
    writer.add_context_length(recipe.context_length)
    writer.add_embedding_length(recipe.width)
    writer.add_block_count(recipe.num_layers)
    writer.add_feed_forward_length(recipe.feed_forward)
    writer.add_head_count(recipe.num_heads)
    writer.add_head_count_kv(recipe.num_kv_heads)
    writer.add_layer_norm_rms_eps(recipe.norm_epsilon)
    writer.add_rope_freq_base(recipe.rope_base)
    writer.add_rope_dimension_count(recipe.head_dim)
    writer.add_vocab_size(recipe.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    merges = tokenizer["model"]["merges"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([control, control, *[normal] * (len(tokens) - 2)])
    # Older versions of tokenizers write a merge as one string, newer ones as a pair.
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)


def main(folder: Path = Path("demo"), output: Path = Path("demo-f16.gguf")) -> None:
    """Write the GGUF file.

    Parameters
    ----------
    folder
        Holds tokenizer.json and model.safetensors.
    output
        GGUF file to write.
    """
    export(folder / "model.safetensors", folder / "tokenizer.json", output)
    print(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    cyclopts.run(main)
