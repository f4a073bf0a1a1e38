"""How a step attends to the pages of a layer: by which route, and in what scratch; the one place
that knows how many programs or threads share a token's keys."""

from __future__ import annotations

from typing import Any

from hypocenter.base.tensor import Tensor
from hypocenter.device.plan import PlanBuilder, bucket
from hypocenter.kernels.attention.attention import (
    TileScratch,
    allocate_tile_scratch,
    attention,
    fits_f16,
)
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.linear.quantise import quantise
from hypocenter.kernels.rowwise.hadamard import hadamard, size_for
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.layers.activations import Activations
from hypocenter.model.layers.step_buffers import KVPages, StepInputs
from hypocenter.model.layers.unfused import AttentionArguments, UnfusedAttention


class Attending:
    """Attention in all plans of a decoder, with scratch that they share."""

    def __init__(
        self,
        arch: Architecture,
        inputs: StepInputs,
        pages: KVPages,
        max_tokens: int,
        route: str,
    ) -> None:
        """`route` is one of config.ATTENTIONS; raises UsageError for parts on the CPU."""
        self._arch, self._inputs, self._uses_hadamard = arch, inputs, pages.uses_hadamard
        #: A token sees the keys up to there: up to itself, or all of its text.
        self._last_seen = inputs.positions if inputs.last_seen is None else inputs.last_seen
        self._unfused: UnfusedAttention | None = None
        # By what layers differ in: the shape of their pages.
        self._gpu_tiles: dict[tuple[int, ...], TileScratch] = {}
        self._cpu_tiles: dict[tuple[int, ...], Tensor] = {}
        device, (num_sequences, max_blocks) = inputs.counts.device, inputs.block_tables.shape
        if route == "parts" and pages.keys:
            max_context = max_blocks * pages.keys[0].shape[3]
            self._unfused = UnfusedAttention.allocate(
                arch, max_tokens, num_sequences, max_context, device=device
            )
            return
        most = bucket(num_sequences, max_tokens)
        for keys, values in pages.kinds:
            if device == "cpu":
                self._cpu_tiles[keys.shape] = allocate_tile_scratch(
                    keys, values, max_tokens, arch.num_heads, max_blocks
                )
            else:
                self._gpu_tiles[keys.shape] = TileScratch.allocate(
                    keys, values, most, arch.num_heads, max_blocks, device=device
                )

    @property
    def is_fused(self) -> bool:
        """Whether launches before it may be joined too."""
        return self._unfused is None

    def begin(self, plan: PlanBuilder) -> None:
        """Append what a step needs once."""
        if self._unfused is not None:
            inputs = self._inputs
            self._unfused.measure(plan, inputs.sequence_rows, self._last_seen, inputs.counts)

    def attend(
        self,
        num_tokens: int,
        num_logit_rows: int,
        num_sequences: int | None,
        plan: PlanBuilder,
        b: Activations,
        keys: Tensor,
        values: Tensor,
        **settings: Any,
    ) -> None:
        """Append attention of b.q to these pages into b.attended, in a step of that shape.

        `settings` are what layers differ in: those of `attention`.
        """
        inputs, codes = self._inputs, None
        if self._uses_hadamard:
            codes = settings.pop("codes", None)
            size = size_for(keys.shape[2], settings.get("value_dim", keys.shape[2]))
            width = self._arch.num_heads * keys.shape[2]
            hadamard(plan, b.q, inputs.counts, width=width, size=size)
        given = AttentionArguments(
            q=b.q,
            k_cache=keys,
            v_cache=values,
            block_tables=inputs.block_tables,
            sequence_rows=inputs.sequence_rows,
            positions=self._last_seen,
            out=b.attended,
            counts=inputs.counts,
            scale=self._arch.attn_scale,
            **settings,
        )
        if self._unfused is not None:
            self._unfused.attend(plan, given)
            return
        # Tokens that are few, or (each wants logits) each of a sequence of its own, have many
        # programs share their keys; those of a prompt share programs.
        are_shared = num_tokens <= 8 or num_logit_rows >= num_tokens
        tiles = self._gpu_tiles.get(keys.shape) if are_shared else None
        if tiles is not None and num_tokens > tiles.values.shape[0]:
            tiles = None
        attention(
            plan,
            **given.by_name,
            num_heads=self._arch.num_heads,
            num_sequences=num_sequences,
            partial=tiles,
            parts=self._cpu_tiles.get(keys.shape),
        )
        if self._uses_hadamard:
            self._turn_back(plan, b, keys, values, settings.get("value_dim"), codes)

    def _turn_back(
        self,
        plan: PlanBuilder,
        b: Activations,
        keys: Tensor,
        values: Tensor,
        value_dim: int | None,
        codes: Operands | None,
    ) -> None:
        """b.attended, which lies between rotated values, as it is without; and codes of it."""
        counts, value_dim = self._inputs.counts, value_dim or keys.shape[2]
        width, size = self._arch.num_heads * value_dim, size_for(keys.shape[2], value_dim)
        hadamard(plan, b.attended, counts, width=width, size=size)
        if codes is not None:
            quantise(plan, b.attended, width, codes, counts, is_plain=fits_f16(values))
