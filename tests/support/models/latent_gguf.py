"""How converters lay attention with latents out in a GGUF file; writes none.

Follows llama.cpp's conversion script of DeepSeek models: newer files have what makes keys and what
makes values apart, by head, the former turned; older ones keep them together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def as_converted_latent(
    metadata: Mapping[str, Any], config: Any, name: str, values: np.ndarray
) -> dict[str, np.ndarray]:
    """A tensor under the names that converters know, in the layout that the metadata imply."""
    stem, found, _ = name.partition("kv_b_proj.weight")
    if not found or "attention.key_length_mla" not in metadata:
        return {name: values}
    plain, rank = config.qk_nope_head_dim, config.kv_lora_rank
    heads = values.reshape(config.num_attention_heads, plain + config.v_head_dim, rank)
    return {
        f"{stem}k_b_proj.weight": np.ascontiguousarray(heads[:, :plain].swapaxes(1, 2)),
        f"{stem}v_b_proj.weight": np.ascontiguousarray(heads[:, plain:]),
    }
