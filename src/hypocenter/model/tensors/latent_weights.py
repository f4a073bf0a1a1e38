"""What tensors attention with latents has, in a file and once they are loaded.

Names and layouts follow llama.cpp (src/models/deepseek2.cpp and its conversion scripts).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.tensor import Tensor
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.latent import Latent
from hypocenter.model.tensors.tensor_spec import (
    Loaded,
    TensorKind,
    TensorSpec,
    matrices,
    matrix,
    vector,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """Attention with latents: matrices packed, norms f32 padded to 64.

    `q` makes queries, or what `q_up` makes them of, normed; `latent` and `rotated` make what the
    cache holds. By head, f16 or f32 [num_heads, inputs, outputs padded to 64]: `keys` makes queries
    of latents and `values` makes values of them.
    """

    q: Tensor
    q_norm: Tensor | None = None
    q_up: Tensor | None = None
    latent: Tensor
    rotated: Tensor
    norm: Tensor
    keys: Tensor
    values: Tensor
    output: Tensor

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What its input is multiplied with."""
        return self.q, self.latent, self.rotated

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """The weights that rows of activations are multiplied with."""
        return (*self.read, self.output, *(() if self.q_up is None else (self.q_up,)))


def latent_tensors(arch: Architecture, latent: Latent) -> Iterator[TensorSpec]:
    """The tensors of one layer, without its prefix."""
    num_heads, width, low, rank = arch.num_heads, arch.width, latent.query_rank, latent.rank
    q_rows = num_heads * latent.key_dim
    if low:
        yield matrix("attn_q_a.weight", "latent.q", low, width)
    else:
        yield matrix("attn_q.weight", "latent.q", q_rows, width)
    counts = {"latent.latent": rank, "latent.rotated": latent.rope_dim}
    yield matrices("attn_kv_a_mqa.weight", counts, width)
    plain, value_dim = latent.plain_dim, latent.value_dim
    keys = Loaded("latent.keys", (num_heads, plain, rank))
    values = Loaded("latent.values", (num_heads, rank, value_dim))
    if latent.is_split:
        yield TensorSpec("attn_k_b.weight", (num_heads, rank, plain), TensorKind.BY_HEAD, (keys,))
        yield TensorSpec(
            "attn_v_b.weight", (num_heads, value_dim, rank), TensorKind.BY_HEAD, (values,)
        )
    else:
        shape = (num_heads * (plain + value_dim), rank)
        yield TensorSpec("attn_kv_b.weight", shape, TensorKind.BY_HEAD, (keys, values))
    if low:
        yield vector("attn_q_a_norm.weight", "latent.q_norm", low)
        yield matrix("attn_q_b.weight", "latent.q_up", q_rows, low)
    yield vector("attn_kv_a_norm.weight", "latent.norm", rank)
    yield matrix("attn_output.weight", "latent.output", width, num_heads * value_dim)


def by_head(
    latent: Latent, num_heads: int, numbers: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], ...]:
    """The numbers of a tensor by head, [num_heads, inputs, outputs] for each that it is loaded as:
    what makes each head's query one of latents, what makes its value of one, or both."""
    if latent.is_split:
        return (numbers.swapaxes(1, 2),)
    plain = latent.plain_dim
    heads = numbers.reshape(num_heads, plain + latent.value_dim, latent.rank)
    keys, values = heads[:, :plain], heads[:, plain:].swapaxes(1, 2)
    return keys, values
