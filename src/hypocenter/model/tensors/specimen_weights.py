"""Weights of the models that specimens are planned with: they hold anything, and take no room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hypocenter.base.tensor import DType, Tensor, contiguous_strides
from hypocenter.device import memory
from hypocenter.kernels.linear.adapter_sizes import RANKS
from hypocenter.kernels.weights.gpu_layout import UNITS
from hypocenter.kernels.weights.packing import Packed
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.families import FAMILIES
from hypocenter.model.facts.state_space import StateSpace
from hypocenter.model.tensors.rope_tables import RopeTables
from hypocenter.model.tensors.table import Adapted, Weights, additions_of, layer_of, tensor_table
from hypocenter.model.tensors.tensor_spec import (
    PACKED,
    Loaded,
    TensorKind,
    TensorSpec,
    padded_shape,
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


def undefined_weights(arch: Architecture, dtype: DType, device: str) -> Weights:
    """A layer of each kind that the architecture has, and what stands around them."""
    table = tensor_table(arch, _names(arch))

    def tensors_of(specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        return {
            part.place: _undefined_tensor(spec.kind, part, dtype, device)
            for spec in specs
            for part in spec.loaded
        }

    first, last = tensors_of(table.first), tensors_of(table.last)
    scale = 0.5 if arch.family.scales_layers else 1.0
    shape = (arch.context_length, arch.rope.dim // 2)
    cos, sin = (allocate_undefined(name, DType.F32, shape, device) for name in ("cos", "sin"))
    return Weights(
        token_table=first["token_table"],
        layers=tuple(layer_of(tensors_of(specs), scale) for specs in table.layers),
        output_norm=last.get("output_norm"),
        output=last.get("output", first["token_table"]),
        ropes=RopeTables((cos, sin), (cos, sin)),
        num_bytes=0,
        output_norm_bias=last.get("output_norm_bias"),
        makes_logits=arch.pooling is None,
        additions=additions_of(first),
    )


def with_undefined_adapters(weights: Weights, dtype: DType | None) -> Weights:
    """The weights with two adapters beside each matrix of the layers, of 16 ranks together; None:
    with none."""
    if dtype is None:
        return weights
    placed, num_ranks = {}, 16
    for weight in (matrix for layer in weights.layers for matrix in layer.matrices):
        num_rows, num_columns = weight.shape[-2:]

        def ranks(name: str, width: int, of: Tensor = weight) -> Tensor:
            shape = (*of.shape[:-2], num_ranks, padded_rows(width))
            return allocate_undefined(name, dtype, shape, of.device)

        sizes, device = (num_ranks // RANKS,), weight.device
        placed[id(weight)] = Adapted(
            down=ranks("lora_a", num_columns),
            up=ranks("lora_b", num_rows),
            owners=allocate_undefined("lora owners", DType.I32, sizes, device),
            factors=allocate_undefined("lora factors", DType.F32, sizes, device),
            num_columns=num_columns,
        )
    return replace(weights, adapters=placed)


def _undefined_tensor(kind: TensorKind, part: Loaded, dtype: DType, device: str) -> Tensor:
    """What stands for one tensor; matrices are of type `dtype`."""
    if kind in (*PACKED, TensorKind.ROUTER):
        of_matrix = DType.F32 if kind is TensorKind.ROUTER else dtype
        return _undefined_weight(part.place, of_matrix, part.shape, device)
    shape = padded_shape(part.shape)
    if kind is TensorKind.BY_HEAD:
        of_heads = DType.F32 if dtype is DType.F32 else DType.F16
        return allocate_undefined(part.place, of_heads, shape, device)
    if kind not in (TensorKind.TAPS, TensorKind.ROWS):
        shape = (math.prod(shape),)
    return allocate_undefined(part.place, DType.F32, shape, device)


def _names(arch: Architecture) -> frozenset[str]:
    """The names of those tensors that files may lack and specimens have."""
    names = {f"attn_{part}_norm.weight" for part in "qk"}
    names |= {f"{arch.family.ffn_norm}.weight", "ffn_down_exps.scale", "ssm_conv1d.bias"}
    if arch.family is FAMILIES["llama"]:  # some have, and most have not
        names |= {f"attn_{part}.bias" for part in "qkv"}
    if arch.experts is not None and arch.experts.choice.scores == "sigmoid":
        names.add("exp_probs_b.bias")
    if isinstance(arch.recurrence, StateSpace) and not arch.recurrence.stands_beside:
        names.add("ssm_norm.weight")  # some files of the others have one too
    found = {f"blk.{layer}.{name}" for layer in range(arch.num_layers) for name in names}
    if arch.part.share_of(arch.vocab_size) != arch.vocab_size:
        found.add("output.weight")
    return frozenset(found)
