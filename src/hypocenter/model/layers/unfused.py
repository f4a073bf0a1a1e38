"""The route attention=parts: the buffers of unfused attention, and its parts in their order.

The decoder also calls the parts of `rope_write` on this route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.memory import allocate, rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import unfused as parts
from hypocenter.kernels.attention.attention import fits_f16
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.linear.quantise import quantise
from hypocenter.model.facts.architecture import Architecture


class _Expanded(NamedTuple):
    """keys and values f32 [num_sequences, num_heads, max_context, their columns], and keys with
    their last two axes exchanged."""

    keys: Tensor
    transposed: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """What the attention of a layer reads, writes and depends on, by the names of `attention`
    (`kernels/attention/attention.py`), which has shapes and meanings."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    sequence_rows: Tensor
    positions: Tensor
    out: Tensor
    counts: Tensor
    scale: float
    window: int
    softcap: float
    codes: Operands | None = None
    sinks: Tensor | None = None
    value_dim: int | None = None
    keeps_out: bool = False

    @property
    def by_name(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class UnfusedAttention:
    """Static buffers that all plans share, and all layers with heads of one size.

    lengths i32 [num_sequences]; scores f32 [max_tokens, num_heads, max_context]; expanded by the
    size of a head.
    """

    lengths: Tensor
    scores: Tensor
    expanded: Mapping[int, _Expanded]

    @classmethod
    def allocate(
        cls,
        arch: Architecture,
        max_tokens: int,
        num_sequences: int,
        max_context: int,
        *,
        device: str,
    ) -> UnfusedAttention:
        """Raises OutOfMemory where they do not fit, UsageError on the CPU."""
        parts.require_gpu(device)

        def floats(name: str, *shape: int) -> Tensor:
            return allocate(name, "decoder", DType.F32, shape, device=device)

        heads = (num_sequences, arch.num_heads)

        def room_for(head_dim: int, value_dim: int) -> _Expanded:
            return _Expanded(
                keys=floats("keys", *heads, max_context, head_dim),
                transposed=floats("transposed_keys", *heads, head_dim, max_context),
                values=floats("values", *heads, max_context, value_dim),
            )

        sizes = {shape.head_dim: shape.value_dim for shape in arch.layers}
        return cls(
            lengths=allocate("lengths", "decoder", DType.I32, (num_sequences,), device=device),
            scores=floats("scores", max_tokens, arch.num_heads, max_context),
            expanded={head_dim: room_for(head_dim, size) for head_dim, size in sizes.items()},
        )

    def measure(
        self, plan: PlanBuilder, sequence_rows: Tensor, positions: Tensor, counts: Tensor
    ) -> None:
        """Append, once per step, what tells the parts how long each sequence is."""
        reach = parts.Rows(sequence_rows, self.lengths, counts)
        parts.context_lengths(plan, reach, positions, max_context=self.scores.shape[2])

    def attend(self, plan: PlanBuilder, given: AttentionArguments) -> None:
        """Append what `attention` does, part by part. Values have as many columns as there was made
        room for."""
        reach = parts.Rows(given.sequence_rows, self.lengths, given.counts)
        scores = rows(self.scores, 0, given.q.shape[0])
        keys, transposed, values = self.expanded[given.k_cache.shape[2]]
        parts.expand_keys(plan, given.k_cache, given.block_tables, self.lengths, keys)
        parts.expand_values(plan, given.v_cache, given.block_tables, self.lengths, values)
        parts.transpose(plan, keys, self.lengths, transposed)
        parts.scores(plan, given.q, transposed, reach, scores)
        parts.scale_scores(plan, scores, reach, scale=given.scale, softcap=given.softcap)
        parts.mask(plan, scores, reach, given.positions, window=given.window)
        parts.softmax(plan, scores, reach, sinks=given.sinks)
        parts.weighted_sum(plan, scores, values, reach, given.out)
        if given.codes is not None:
            _, num_heads, _, head_dim = values.shape
            width, is_plain = num_heads * head_dim, fits_f16(given.v_cache)
            quantise(plan, given.out, width, given.codes, given.counts, is_plain=is_plain)
