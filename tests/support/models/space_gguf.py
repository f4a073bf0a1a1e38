"""How converters lay a state space (Mamba-2) of transformers out in a GGUF file; writes none.

Follows llama.cpp's conversion scripts of Mamba-2, Granite and Falcon H1.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_NAMES = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "in_proj.weight": "ssm_in.weight",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


def is_of_space(name: str) -> bool:
    return ".mamba." in name or ".mixer." in name


def as_converted_space(config: Any, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor under the name that it has in files, in their layout; Falcon's with its factors."""
    place, own = re.split(r"\.(?:mamba|mixer)\.", name)
    layer = place.rpartition(".")[2]
    if own == "A_log":
        values = -np.exp(values)
    if own in ("A_log", "D"):
        values = values[:, None]
    elif own == "conv1d.weight":
        values = values[:, 0]
    elif own == "norm.weight":
        groups = config.n_groups if config.model_type == "mamba2" else config.mamba_n_groups
        values = values.reshape(groups, -1)
    elif config.model_type == "falcon_h1":
        values = _with_factors(config, own, values)
    return {f"blk.{layer}.{_NAMES[own]}": np.ascontiguousarray(values, np.float32)}


def _with_factors(config: Any, own: str, values: np.ndarray) -> np.ndarray:
    if own == "out_proj.weight":
        return np.asarray(values * config.ssm_out_multiplier)
    if own != "in_proj.weight":
        return values
    inner, groups = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    counts = (inner, inner, groups, groups, config.mamba_n_heads)
    factors = np.repeat(config.ssm_multipliers, counts)
    return np.asarray(values * config.ssm_in_multiplier * factors[:, None])


def with_falcon_factors(config: Any, name: str, values: np.ndarray) -> np.ndarray:
    """Another tensor of Falcon H1 with the factors that converters fold into it."""
    by_name = {
        "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1],
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.attention_in_multiplier * config.key_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return values * next((by for part, by in by_name.items() if part in name), 1.0)
