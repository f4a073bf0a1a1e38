"""Weights of the models that specimens are planned with: they hold anything, and take no room."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypocenter.base.tensor import DType, Tensor, contiguous_strides
from hypocenter.device import memory
from hypocenter.kernels.weights.gpu_layout import UNITS
from hypocenter.kernels.weights.packing import Packed
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.experts import Experts
from hypocenter.model.facts.families import FAMILIES
from hypocenter.model.facts.latent import Latent
from hypocenter.model.facts.recurrence import AnyRecurrence, Convolution
from hypocenter.model.facts.state_space import StateSpace
from hypocenter.model.tensors.rope_tables import RopeTables
from hypocenter.model.tensors.weight_tensors import (
    BesideDense,
    ConvWeights,
    DeltaWeights,
    FeedForward,
    LatentWeights,
    LayerWeights,
    MixerWeights,
    Mixture,
    SpaceWeights,
    Weights,
)


def allocate_undefined(name: str, dtype: DType, shape: tuple[int, ...], device: str) -> Tensor:
    return memory.allocate_undefined(name, "model", dtype, shape, device=device)


def _undefined_weight(name: str, dtype: DType, shape: tuple[int, ...], device: str) -> Tensor:
    """A packed weight, or a stack of them, whose arrays hold anything."""
    layout, (*stack, num_rows, num_columns) = UNITS[dtype], shape
    float_type = DType.I16 if dtype is DType.BF16 else dtype
    kinds = (float_type,) if layout.is_float else (DType.I32, DType.F16, DType.F16)
    all_rows = math.prod(stack) * num_rows
    bases = [allocate_undefined(name, kind, (all_rows * num_columns,), device) for kind in kinds]
    numbers = () if layout.is_float else (float(layout.zero), 1.0)
    packed = Packed(dtype, (*(base.data for base in bases), *numbers), all_rows, num_columns)
    strides = contiguous_strides(shape)
    return Tensor(name, "model", dtype, shape, strides, 0, bases[0].allocation, packed)


def undefined_weights(facts: Architecture, dtype: DType, device: str) -> Weights:
    """A layer of each kind that the architecture has, and what stands around them."""
    return _Maker(facts, dtype, device).weights()


_OF_CONVOLUTION = ("conv_gate_in", "conv_gate_out", "conv_x", "conv_output")


class _Maker:
    """Makes the weights of one architecture, matrices in one type."""

    def __init__(self, facts: Architecture, dtype: DType, device: str) -> None:
        self._facts, self._dtype, self._device = facts, dtype, device
        experts = facts.family.experts
        self._is_biased = experts is not None and experts.is_biased
        self._is_beside = experts is not None and experts.stands_beside

    def weights(self) -> Weights:
        facts = self._facts
        layers = [self._layer()]
        if facts.latent is not None:
            layers = [self._of_latents(layers[0], facts.latent)]
        if isinstance(facts.recurrence, StateSpace) and facts.recurrence.stands_beside:
            layers = [replace(layers[0], mixer=self._mixer(facts.recurrence))]
        elif facts.recurrence is not None:
            layers.insert(0, self._recurrent(layers[0], facts.recurrence))
        turned = (facts.context_length, facts.rope.dim // 2)
        cos, sin = (
            allocate_undefined(name, DType.F32, turned, self._device) for name in ("cos", "sin")
        )
        token_table = self._matrix("token_embd", facts.vocab_size, facts.width)
        norm = self._vector("output_norm", facts.width)
        norm_bias = self._vector_if(facts.family.layer_norms, "output_norm_bias", facts.width)
        ropes = RopeTables((cos, sin), (cos, sin))
        num_tokens, output = facts.part.share_of(facts.vocab_size), token_table
        if num_tokens != facts.vocab_size:
            output = self._matrix("output", num_tokens, facts.width)
        return Weights(
            token_table, tuple(layers), norm, output, ropes, 0, output_norm_bias=norm_bias
        )

    def _matrix(self, name: str, *shape: int, kind: DType | None = None) -> Tensor:
        return _undefined_weight(name, kind or self._dtype, shape, self._device)

    def _vector(self, name: str, *shape: int) -> Tensor:
        padded = (*shape[:-1], padded_rows(shape[-1]))
        return allocate_undefined(name, DType.F32, padded, self._device)

    def _vector_if(self, wanted: bool, name: str, length: int) -> Tensor | None:
        return self._vector(name, length) if wanted else None

    def _layer(self) -> LayerWeights:
        """A layer with attention."""
        facts, family, width = self._facts, self._facts.family, self._facts.width
        shape, heads = facts.layers[-1], facts.q_width(0)
        has_ffn_norm = family.pre_norms and family.ffn_norm != ""
        has_biases = family is FAMILIES["llama"]  # some have, and most have not
        matrix, vector_if, by_head = self._matrix, self._vector_if, family.norms_by_head
        return LayerWeights(
            attn_norm=vector_if(family.pre_norms, "attn_norm", width),
            q=matrix("q", heads, width),
            k=matrix("k", shape.kv_width, width),
            v=None if family.norms_values else matrix("v", shape.kv_width, width),
            q_bias=vector_if(has_biases, "q_bias", heads),
            k_bias=vector_if(has_biases, "k_bias", shape.kv_width),
            v_bias=vector_if(has_biases, "v_bias", shape.kv_width),
            q_norm=vector_if(family.qk_norm, "q_norm", heads if by_head else shape.head_dim),
            k_norm=vector_if(
                family.qk_norm, "k_norm", shape.kv_width if by_head else shape.head_dim
            ),
            attn_output=matrix("attn_output", width, heads),
            attn_output_bias=None,
            post_attn_norm=vector_if(family.post_norms, "post_attn_norm", width),
            ffn_norm=vector_if(has_ffn_norm, "ffn_norm", width),
            dense=self._feed_forward(shape.ffn_width) if facts.is_dense(0) else None,
            mixture=self._mixture(facts.experts) if facts.experts else None,
            post_ffn_norm=vector_if(family.post_norms, "post_ffn_norm", width),
            attn_norm_bias=vector_if(family.layer_norms, "attn_norm_bias", width),
            ffn_norm_bias=vector_if(family.layer_norms and has_ffn_norm, "ffn_norm_bias", width),
            head_norm_bias=vector_if(by_head, "head_norm_bias", heads),
            sinks=vector_if(family.has_sinks, "sinks", facts.num_heads),
            v_norm=vector_if(family.norms_values, "v_norm", shape.head_dim),
            scale=0.5 if family.scales_layers else 1.0,
            attn_gate=matrix("attn_gate", heads, width) if family.gates_attention else None,
        )

    def _recurrent(self, layer: LayerWeights, recurrence: AnyRecurrence) -> LayerWeights:
        """The same layer with what carries a state in the place of attention."""
        of_attention = ("q", "k", "v", "q_norm", "k_norm", "attn_gate", "attn_output")
        none: dict[str, Any] = dict.fromkeys(of_attention)
        return replace(layer, **none, mixer=self._mixer(recurrence))

    def _mixer(self, recurrence: AnyRecurrence) -> MixerWeights:
        matrix, vector, width = self._matrix, self._vector, self._facts.width
        if isinstance(recurrence, Convolution):
            gate_in, gate_out, x, output = (matrix(name, width, width) for name in _OF_CONVOLUTION)
            conv = vector("conv", recurrence.num_taps, width)
            return ConvWeights(gate_in, gate_out, x, conv, output)
        if isinstance(recurrence, StateSpace):
            return self._space(recurrence)
        num_heads, values = recurrence.num_value_heads, recurrence.values_width
        return DeltaWeights(
            qkv=matrix("qkv", recurrence.mixed_width, width),
            gate=matrix("delta_gate", values, width),
            beta=matrix("beta", num_heads, width),
            step=matrix("step", num_heads, width),
            step_bias=vector("step_bias", num_heads),
            rates=vector("rates", num_heads),
            conv=vector("conv", recurrence.num_taps, recurrence.mixed_width),
            norm=vector("delta_norm", recurrence.value_dim),
            output=matrix("delta_output", width, values),
        )

    def _space(self, space: StateSpace) -> SpaceWeights:
        matrix, vector, width = self._matrix, self._vector, self._facts.width
        gate, mixed, step = (
            matrix(name, count, width)
            for name, count in zip(("space_gate", "mixed", "step"), space.part_rows, strict=True)
        )
        has_norm = not space.stands_beside  # some files of those have one too
        return SpaceWeights(
            gate=gate,
            mixed=mixed,
            step=step,
            step_bias=vector("step_bias", space.num_heads),
            rates=vector("rates", space.num_heads),
            skips=vector("skips", space.num_heads),
            conv=vector("conv", space.num_taps, space.mixed_width),
            conv_bias=vector("conv_bias", space.mixed_width),
            norm=self._vector_if(has_norm, "space_norm", space.values_width),
            output=matrix("space_output", width, space.values_width),
        )

    def _of_latents(self, layer: LayerWeights, latent: Latent) -> LayerWeights:
        """The same layer with attention over latents, queries of which come of x."""
        num_heads, width, matrix = self._facts.num_heads, self._facts.width, self._matrix
        kind = DType.F32 if self._dtype is DType.F32 else DType.F16

        def by_head(name: str, num_inputs: int, num_outputs: int) -> Tensor:
            shape = (num_heads, num_inputs, padded_rows(num_outputs))
            return allocate_undefined(name, kind, shape, self._device)

        weights = LatentWeights(
            q=matrix("q", num_heads * latent.key_dim, width),
            q_norm=None,
            q_up=None,
            latent=matrix("latent", latent.rank, width),
            turned=matrix("turned", latent.turned_dim, width),
            norm=self._vector("norm", latent.rank),
            keys=by_head("keys", latent.plain_dim, latent.rank),
            values=by_head("values", latent.rank, latent.value_dim),
            output=matrix("latent_output", width, num_heads * latent.value_dim),
        )
        none: dict[str, Any] = dict.fromkeys(("q", "k", "v", "attn_output"))
        return replace(layer, **none, latent=weights)

    def _feed_forward(self, inner: int, *stack: int) -> FeedForward:
        width, matrix = self._facts.width, self._matrix
        up = matrix("up", *stack, inner, width)
        gate = matrix("gate", *stack, inner, width) if self._facts.family.has_gate else None
        down = matrix("down", *stack, width, inner)
        if not (stack and self._is_biased):
            return FeedForward(gate, up, None, down)
        biases = {
            name: self._vector(name, stack[0] * padded_rows(length))
            for name, length in (("gate_bias", inner), ("up_bias", inner), ("down_bias", width))
        }
        return FeedForward(gate, up, None, down, **biases)

    def _mixture(self, experts: Experts) -> Mixture:
        choice, width, vector_if = experts.choice, self._facts.width, self._vector_if
        num_rows, shared = choice.num_experts + choice.has_gate, experts.shared_width
        beside = [self._vector(name, width) for name in BesideDense._fields if self._is_beside]
        return Mixture(
            router=self._matrix("router", num_rows, width, kind=DType.F32),
            bias=vector_if(choice.scores == "sigmoid", "bias", choice.num_experts),
            experts=self._feed_forward(experts.width, choice.num_experts),
            shared=self._feed_forward(shared) if shared else None,
            router_bias=vector_if(self._is_biased, "router_bias", choice.num_experts),
            factors=vector_if(self._is_beside, "factors", choice.num_experts),
            beside=BesideDense(*beside) if beside else None,
        )
