"""Takes the tensors of a layer that carries a state out of a file; packs nothing itself.

Names and layouts follow llama.cpp (src/models/qwen35.cpp, qwen3next.cpp, lfm2.cpp,
granite-hybrid.cpp, falcon-h1.cpp, and the conversion scripts).
"""

from __future__ import annotations

from typing import Protocol

from hypocenter.base.tensor import Tensor
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.recurrence import Convolution, Recurrence
from hypocenter.model.facts.state_space import StateSpace
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors.weight_tensors import (
    ConvWeights,
    DeltaWeights,
    MixerWeights,
    SpaceWeights,
)


class TakesTensors(Protocol):
    """What a loader does by name; see there."""

    def matrix(self, name: str, num_rows: int, num_columns: int) -> Tensor: ...

    file: GGUFFile

    def by_turns(
        self, name: str, row_counts: tuple[int, ...], num_turns: int
    ) -> tuple[Tensor, Tensor]: ...

    def in_parts(self, name: str, row_counts: tuple[int, ...]) -> tuple[Tensor, ...]: ...

    def vector(self, name: str, length: int) -> Tensor: ...

    def flat(self, name: str, *shape: int) -> Tensor: ...

    def optional(self, name: str, *shape: int) -> Tensor | None: ...

    def taps(self, name: str, num_channels: int, num_taps: int) -> Tensor: ...


def load_mixer(loader: TakesTensors, facts: Architecture, prefix: str) -> MixerWeights:
    """Those of the layer of that prefix.

    Raises what the loader raises for a tensor that is missing or of a wrong shape.
    """
    recurrence = facts.recurrence
    assert recurrence is not None
    if isinstance(recurrence, Convolution):
        return _load_convolution(loader, recurrence, prefix)
    if isinstance(recurrence, StateSpace):
        return _load_space(loader, facts, recurrence, prefix)
    return _load_delta(loader, facts, recurrence, prefix)


def _load_convolution(loader: TakesTensors, recurrence: Convolution, prefix: str) -> ConvWeights:
    width, prefix = recurrence.width, f"{prefix}shortconv."
    gate_in, gate_out, x = loader.in_parts(f"{prefix}in_proj.weight", (width,) * 3)
    conv = loader.taps(f"{prefix}conv.weight", width, recurrence.num_taps)
    return ConvWeights(gate_in, gate_out, x, conv, loader.matrix(f"{prefix}out_proj", width, width))


def _load_delta(
    loader: TakesTensors, facts: Architecture, recurrence: Recurrence, prefix: str
) -> DeltaWeights:
    """Files hold its rates as numbers below 0."""
    family, width = facts.family, facts.width
    assert family.recurrence is not None
    num_heads, values = recurrence.num_value_heads, recurrence.values_width
    if family.recurrence.joins_steps:
        name, num_turns = f"{prefix}ssm_ba.weight", recurrence.num_key_heads
        beta, step = loader.by_turns(name, (num_heads, num_heads), num_turns)
    else:
        beta = loader.matrix(f"{prefix}ssm_beta", num_heads, width)
        step = loader.matrix(f"{prefix}ssm_alpha", num_heads, width)
    mixed, num_taps = recurrence.mixed_width, recurrence.num_taps
    joint = f"{prefix}ssm_in.weight"
    if family.recurrence.joins_steps and joint in loader.file.tensors:
        # As first files of Qwen3-Next have it: what a head of keys has of all stands together.
        keys = (mixed - values) // 2
        qkv, gate = loader.by_turns(joint, (keys, keys, values, values), recurrence.num_key_heads)
    else:
        qkv = loader.matrix(f"{prefix}attn_qkv", mixed, width)
        gate = loader.matrix(f"{prefix}attn_gate", values, width)
    return DeltaWeights(
        qkv=qkv,
        gate=gate,
        beta=beta,
        step=step,
        step_bias=loader.vector(f"{prefix}ssm_dt.bias", num_heads),
        rates=loader.vector(f"{prefix}ssm_a", num_heads),
        conv=loader.taps(f"{prefix}ssm_conv1d.weight", mixed, num_taps),
        norm=loader.vector(f"{prefix}ssm_norm.weight", recurrence.value_dim),
        output=loader.matrix(f"{prefix}ssm_out", width, values),
    )


def _load_space(
    loader: TakesTensors, facts: Architecture, space: StateSpace, prefix: str
) -> SpaceWeights:
    """One matrix of the file makes gates, what is convolved and the steps, in this order."""
    num_heads, mixed = space.num_heads, space.mixed_width
    groups = (space.num_groups, space.values_width // space.num_groups)
    gate, of_conv, step = loader.in_parts(f"{prefix}ssm_in.weight", space.part_rows)
    return SpaceWeights(
        gate=gate,
        mixed=of_conv,
        step=step,
        step_bias=loader.vector(f"{prefix}ssm_dt.bias", num_heads),
        rates=loader.flat(f"{prefix}ssm_a", num_heads, 1),
        skips=loader.flat(f"{prefix}ssm_d", num_heads, 1),
        conv=loader.taps(f"{prefix}ssm_conv1d.weight", mixed, space.num_taps),
        conv_bias=loader.optional(f"{prefix}ssm_conv1d.bias", mixed),
        norm=loader.optional(f"{prefix}ssm_norm.weight", *groups),
        output=loader.matrix(f"{prefix}ssm_out", facts.width, space.values_width),
    )
