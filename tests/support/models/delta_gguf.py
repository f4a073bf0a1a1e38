"""How converters lay a Gated Delta Net of transformers out in a GGUF file; writes none.

Follows llama.cpp's conversion script of Qwen models.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def is_of_delta_net(name: str) -> bool:
    return ".linear_attn." in name


def as_converted_delta(
    arch: str, config: Any, name: str, values: np.ndarray
) -> dict[str, np.ndarray]:
    """A tensor under the names that converters know, in their layout."""
    stem, _, own = name.partition(".linear_attn.")
    part = f"{stem}.linear_attn."
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    if own == "in_proj_qkvz.weight":
        each = num_values // num_keys * value_dim
        heads = values.reshape(num_keys, -1, values.shape[1])
        parts = np.split(heads, np.cumsum([key_dim, key_dim, each]), axis=1)
        q, k, v, z = (rows.reshape(-1, values.shape[1]) for rows in parts)
        return {
            f"{part}in_proj_qkv.weight": np.concatenate([q, k, v]),
            f"{part}in_proj_z.weight": z,
        }
    if own == "A_log":
        values = -np.exp(values)
    elif own == "dt_bias":
        own = "dt_proj.bias"
    elif own == "conv1d.weight":
        values = values[:, 0]
    if arch != "qwen3next":
        values = _by_turns(own, values, num_keys, num_values, key_dim, value_dim)
    return {f"{part}{own}": np.ascontiguousarray(values)}


def _by_turns(
    own: str, values: np.ndarray, num_keys: int, num_values: int, key_dim: int, value_dim: int
) -> np.ndarray:
    """Value heads in the order in which they take key heads by turns, where there are some."""

    def turned(rows: np.ndarray) -> np.ndarray:
        grouped = rows.reshape(num_keys, num_values // num_keys, -1, *rows.shape[1:])
        return grouped.swapaxes(0, 1).reshape(rows.shape)

    if own in ("in_proj_qkv.weight", "conv1d.weight"):
        num_others = 2 * num_keys * key_dim
        return np.concatenate([values[:num_others], turned(values[num_others:])])
    if own == "out_proj.weight":
        return turned(values.T).T
    return values if own == "norm.weight" else turned(values)
