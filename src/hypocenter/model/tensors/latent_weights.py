"""Takes the tensors of attention with latents out of a file; places nothing itself.

Names and layouts follow llama.cpp (src/models/deepseek2.cpp and its conversion scripts).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from hypocenter.base.tensor import Tensor
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.latent import Latent
from hypocenter.model.tensors.weight_tensors import LatentWeights


class LatentSource(Protocol):
    """What a loader does by name; see there."""

    def matrix(self, name: str, num_rows: int, num_columns: int) -> Tensor: ...

    def parts(self, name: str, row_counts: tuple[int, ...]) -> tuple[Tensor, ...]: ...

    def vector(self, name: str, length: int) -> Tensor: ...

    def numbers(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]: ...

    def by_head(self, name: str, of: str, values: np.ndarray[Any, Any]) -> Tensor: ...


def load_latent(loader: LatentSource, facts: Architecture, prefix: str) -> LatentWeights:
    """Those of the layer of that prefix.

    Raises what the loader raises for a tensor that is missing or of a wrong shape.
    """
    latent, num_heads, width = facts.latent, facts.num_heads, facts.width
    assert latent is not None
    q_rows, low = num_heads * latent.key_dim, latent.query_rank
    if low:
        q = loader.matrix(f"{prefix}attn_q_a", low, width)
    else:
        q = loader.matrix(f"{prefix}attn_q", q_rows, width)
    of_latent, of_turned = loader.parts(
        f"{prefix}attn_kv_a_mqa.weight", (latent.rank, latent.turned_dim)
    )
    of_keys, of_values = _by_head(loader, latent, num_heads, prefix)
    return LatentWeights(
        q=q,
        q_norm=loader.vector(f"{prefix}attn_q_a_norm.weight", low) if low else None,
        q_up=loader.matrix(f"{prefix}attn_q_b", q_rows, low) if low else None,
        latent=of_latent,
        turned=of_turned,
        norm=loader.vector(f"{prefix}attn_kv_a_norm.weight", latent.rank),
        keys=of_keys,
        values=of_values,
        output=loader.matrix(f"{prefix}attn_output", width, num_heads * latent.value_dim),
    )


def _by_head(
    loader: LatentSource, latent: Latent, num_heads: int, prefix: str
) -> tuple[Tensor, Tensor]:
    """What makes each head's query one of latents, and what makes its value of one."""
    plain, rank, value_dim = latent.plain_dim, latent.rank, latent.value_dim
    if latent.is_split:
        names = f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight"
        keys = loader.numbers(names[0], (num_heads, rank, plain)).swapaxes(1, 2)
        values = loader.numbers(names[1], (num_heads, value_dim, rank)).swapaxes(1, 2)
    else:
        names = (f"{prefix}attn_kv_b.weight",) * 2
        both = loader.numbers(names[0], (num_heads * (plain + value_dim), rank))
        heads = both.reshape(num_heads, plain + value_dim, rank)
        keys, values = heads[:, :plain], heads[:, plain:].swapaxes(1, 2)
    return loader.by_head("keys", names[0], keys), loader.by_head("values", names[1], values)
