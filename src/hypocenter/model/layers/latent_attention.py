"""Attention with latents: its static buffers, and its ops around attention in their order.

A query is multiplied by what would make keys, and attention's result by what would make values, so
neither is ever made (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). All heads share one KV head.
Products before and behind it, and attention itself, are the decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.memory import allocate, rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention.latent_write import latent_write
from hypocenter.kernels.attention.rope import rotate
from hypocenter.kernels.linear.head_linear import head_linear
from hypocenter.kernels.rowwise.hadamard import hadamard, size_for
from hypocenter.kernels.rowwise.norm import rms_norm
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.layers.activations import Activations
from hypocenter.model.layers.step_buffers import StepInputs
from hypocenter.model.tensors.latent_weights import LatentWeights
from hypocenter.model.tensors.rope_tables import RopeTable


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """The ops of all layers; they share buffers f32 [max_tokens, width padded to 64].

    `heads`: queries as they are multiplied out, and later the heads of the result; `queries`: the
    latent that they come of, where there is one; `uses_hadamard` as in `Heads`. b.q has queries as
    the cache has keys, b.k the part of a key that is rotated and b.v the latent.
    """

    arch: Architecture
    inputs: StepInputs
    table: RopeTable
    heads: Tensor
    queries: Tensor | None
    uses_hadamard: bool

    @classmethod
    def allocate(
        cls,
        arch: Architecture,
        inputs: StepInputs,
        table: RopeTable,
        max_tokens: int,
        *,
        uses_hadamard: bool,
    ) -> LatentAttention | None:
        """None for a model whose cache has keys and values of each KV head."""
        latent, device = arch.latent, inputs.counts.device
        if latent is None:
            return None

        def wide(name: str, width: int) -> Tensor:
            shape = (max_tokens, padded_rows(width))
            return allocate(name, "decoder", DType.F32, shape, device=device)

        heads = wide("latent_heads", arch.num_heads * latent.widest)
        queries = wide("latent_queries", latent.query_rank) if latent.query_rank else None
        return cls(arch, inputs, table, heads, queries, uses_hadamard)

    def first(self, num_rows: int) -> LatentAttention:
        """The same for a bucket of `num_rows` tokens."""
        queries = self.queries and rows(self.queries, 0, num_rows)
        return replace(self, heads=rows(self.heads, 0, num_rows), queries=queries)

    def products(self, w: LatentWeights, b: Activations) -> tuple[tuple[Tensor, Tensor, None], ...]:
        """Weights that a layer's input is multiplied with, and where the results go."""
        q = self.heads if self.queries is None else self.queries
        return (w.q, q, None), (w.latent, b.v, None), (w.rotated, b.k, None)

    def norm_queries(self, plan: PlanBuilder, w: LatentWeights) -> Tensor:
        """Append the norm of what queries come of; that, which `w.q_up` is to make them of."""
        latent = self.arch.latent
        assert latent is not None
        assert self.queries is not None
        assert w.q_norm is not None
        self._norm(plan, self.queries, w.q_norm, latent.query_rank)
        return self.queries

    def prepare(
        self, plan: PlanBuilder, b: Activations, w: LatentWeights, keys: Tensor, values: Tensor
    ) -> None:
        """Append what makes queries in b.q and fills the pages."""
        arch, inputs, latent = self.arch, self.inputs, self.arch.latent
        assert latent is not None
        counts, rank, rotated = inputs.counts, latent.rank, latent.rope_dim
        self._norm(plan, b.v, w.norm, rank)
        head_linear(plan, self.heads, w.keys, b.q, counts, num_outputs=rank, num_kept=rotated)
        for x, num_heads, head_dim in (
            (b.q, arch.num_heads, latent.cached_dim),
            (b.k, 1, rotated),
        ):
            rotate(
                plan,
                x,
                inputs.positions,
                self.table,
                counts,
                num_heads=num_heads,
                head_dim=head_dim,
                style=arch.family.rope_style,
            )
        if self.uses_hadamard:
            size = size_for(rank, rotated)
            hadamard(plan, b.k, counts, width=rotated, size=size)
            hadamard(plan, b.v, counts, width=rank, size=size)
        latent_write(plan, b.k, b.v, inputs.slots, keys, values, counts, rank=rank)

    def expand(self, plan: PlanBuilder, w: LatentWeights, attended: Tensor) -> Tensor:
        """Append what makes values of attention's result; those, head by head."""
        latent = self.arch.latent
        assert latent is not None
        head_linear(
            plan,
            attended,
            w.values,
            self.heads,
            self.inputs.counts,
            num_outputs=latent.value_dim,
        )
        return self.heads

    def _norm(self, plan: PlanBuilder, x: Tensor, weight: Tensor, width: int) -> None:
        # Latents are not what layers add to, which may be kept smaller than it is.
        rms_norm(plan, x, weight, self.arch.mixer_eps, x, self.inputs.counts, width=width)
