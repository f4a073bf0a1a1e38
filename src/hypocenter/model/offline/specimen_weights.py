"""Weights of the models that specimens are planned with: they hold anything, and take no room."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypocenter.device import memory
from hypocenter.kernels.weights.gpu_layout import UNITS
from hypocenter.kernels.weights.packing import Packed
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.architecture import Architecture
from hypocenter.model.experts import Experts
from hypocenter.model.families import FAMILIES
from hypocenter.model.rope_tables import RopeTables
from hypocenter.model.weight_tensors import (
    BesideDense,
    DeltaWeights,
    FeedForward,
    LayerWeights,
    Mixture,
    Weights,
)
from hypocenter.tensor import DType, Tensor, contiguous_strides


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


def _delta(facts: Architecture, dtype: DType, device: str) -> DeltaWeights | None:
    if (recurrence := facts.recurrence) is None:
        return None

    def matrix(name: str, num_rows: int, num_columns: int) -> Tensor:
        return _undefined_weight(name, dtype, (num_rows, num_columns), device)

    def floats(name: str, *shape: int) -> Tensor:
        padded = (*shape[:-1], padded_rows(shape[-1]))
        return allocate_undefined(name, DType.F32, padded, device)

    num_heads, values, width = recurrence.num_value_heads, recurrence.values_width, facts.width
    return DeltaWeights(
        qkv=matrix("qkv", recurrence.mixed_width, width),
        gate=matrix("delta_gate", values, width),
        beta=matrix("beta", num_heads, width),
        step=matrix("step", num_heads, width),
        step_bias=floats("step_bias", num_heads),
        rates=floats("rates", num_heads),
        conv=floats("conv", recurrence.num_taps, recurrence.mixed_width),
        norm=floats("delta_norm", recurrence.value_dim),
        output=matrix("delta_output", width, values),
    )


def undefined_weights(facts: Architecture, dtype: DType, device: str) -> Weights:
    def matrix(name: str, *shape: int, kind: DType = dtype) -> Tensor:
        return _undefined_weight(name, kind, shape, device)

    def vector(name: str, length: int) -> Tensor:
        return allocate_undefined(name, DType.F32, (padded_rows(length),), device)

    def vector_if(wanted: bool, name: str, length: int) -> Tensor | None:
        return vector(name, length) if wanted else None

    family, width = facts.family, facts.width

    is_biased = family.experts is not None and family.experts.is_biased
    is_beside = family.experts is not None and family.experts.stands_beside

    def feed_forward(inner: int, *stack: int) -> FeedForward:
        up = matrix("up", *stack, inner, width)
        gate = matrix("gate", *stack, inner, width) if family.has_gate else None
        down = matrix("down", *stack, width, inner)
        if not (stack and is_biased):
            return FeedForward(gate, up, None, down)
        biases = {
            name: vector(name, stack[0] * padded_rows(length))
            for name, length in (("gate_bias", inner), ("up_bias", inner), ("down_bias", width))
        }
        return FeedForward(gate, up, None, down, **biases)

    def mixture(experts: Experts) -> Mixture:
        choice = experts.choice
        shared = experts.shared_width
        return Mixture(
            router=matrix("router", choice.num_experts + choice.has_gate, width, kind=DType.F32),
            bias=vector_if(choice.scores == "sigmoid", "bias", choice.num_experts),
            experts=feed_forward(experts.width, choice.num_experts),
            shared=feed_forward(shared) if shared else None,
            router_bias=vector_if(is_biased, "router_bias", choice.num_experts),
            factors=vector_if(is_beside, "factors", choice.num_experts),
            beside=BesideDense(*(vector(name, width) for name in BesideDense._fields))
            if is_beside
            else None,
        )

    shape = facts.layers[-1]
    heads, kv_heads = facts.q_width(0), shape.kv_width
    has_ffn_norm = family.pre_norms and family.ffn_norm != ""
    has_biases = family is FAMILIES["llama"]  # some have, and most have not
    layer = LayerWeights(
        attn_norm=vector_if(family.pre_norms, "attn_norm", width),
        q=matrix("q", heads, width),
        k=matrix("k", kv_heads, width),
        v=None if family.norms_values else matrix("v", kv_heads, width),
        q_bias=vector_if(has_biases, "q_bias", heads),
        k_bias=vector_if(has_biases, "k_bias", kv_heads),
        v_bias=vector_if(has_biases, "v_bias", kv_heads),
        q_norm=vector_if(family.qk_norm, "q_norm", shape.head_dim),
        k_norm=vector_if(family.qk_norm, "k_norm", shape.head_dim),
        attn_output=matrix("attn_output", width, heads),
        attn_output_bias=None,
        post_attn_norm=vector_if(family.post_norms, "post_attn_norm", width),
        ffn_norm=vector_if(has_ffn_norm, "ffn_norm", width),
        dense=feed_forward(shape.ffn_width) if facts.is_dense(0) else None,
        mixture=mixture(facts.experts) if facts.experts else None,
        post_ffn_norm=vector_if(family.post_norms, "post_ffn_norm", width),
        attn_norm_bias=vector_if(family.layer_norms, "attn_norm_bias", width),
        ffn_norm_bias=vector_if(family.layer_norms and has_ffn_norm, "ffn_norm_bias", width),
        sinks=vector_if(family.has_sinks, "sinks", facts.num_heads),
        v_norm=vector_if(family.norms_values, "v_norm", shape.head_dim),
        scale=0.5 if family.scales_layers else 1.0,
        attn_gate=matrix("attn_gate", heads, width) if family.gates_attention else None,
    )
    layers = [layer]
    if facts.recurrence is not None:
        parts = ("q", "k", "v", "q_norm", "k_norm", "attn_gate")
        no_attention: dict[str, Any] = dict.fromkeys(parts)
        recurrent = replace(
            layer, **no_attention, attn_output=None, delta=_delta(facts, dtype, device)
        )
        layers.insert(0, recurrent)
    turned = (facts.context_length, facts.rope.dim // 2)
    table = tuple(allocate_undefined(name, DType.F32, turned, device) for name in ("cos", "sin"))
    pair = (table[0], table[1])
    token_table = matrix("token_embd", facts.vocab_size, width)
    norm = vector("output_norm", width)
    norm_bias = vector_if(family.layer_norms, "output_norm_bias", width)
    return Weights(
        token_table,
        tuple(layers),
        norm,
        token_table,
        RopeTables(pair, pair),
        0,
        output_norm_bias=norm_bias,
    )
