"""What tensors a layer that carries a state has, in a file and once they are loaded.

Names and layouts follow llama.cpp (src/models/qwen35.cpp, qwen3next.cpp, lfm2.cpp,
granite-hybrid.cpp, falcon-h1.cpp, and the conversion scripts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypocenter.base.tensor import Tensor
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.recurrence import Convolution, Recurrence
from hypocenter.model.facts.state_space import StateSpace
from hypocenter.model.tensors.tensor_spec import (
    TensorSpec,
    by_turns,
    matrices,
    matrix,
    taps,
    vector,
)


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """A Gated Delta Net: matrices packed, vectors f32 padded to 64.

    `gate`: what its result is gated by; `beta` and `step`: both numbers of each value head, the
    latter with a bias; `rates` are below 0. conv f32 [num_taps, channels padded to 64].
    """

    qkv: Tensor
    gate: Tensor
    beta: Tensor
    step: Tensor
    step_bias: Tensor
    rates: Tensor
    conv: Tensor
    norm: Tensor
    output: Tensor

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What its input is multiplied with."""
        return self.qkv, self.gate, self.beta, self.step


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """A gated short convolution: matrices packed, conv f32 [num_taps, channels padded to 64].

    `gate_in` gates what the convolution takes of `x`, and `gate_out` what it gives.
    """

    gate_in: Tensor
    gate_out: Tensor
    x: Tensor
    conv: Tensor
    output: Tensor

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What its input is multiplied with."""
        return self.gate_in, self.gate_out, self.x


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceWeights:
    """A state space (Mamba-2): matrices packed, vectors f32 padded to 64.

    `gate`: what its result is gated by; `step`: a number of each head, with a bias; `rates` are
    below 0, `skips` what values themselves add. conv f32 [num_taps, channels padded to 64]. `norm`
    has a number for each column of all groups; None: the result is gated alone.
    """

    gate: Tensor
    mixed: Tensor
    step: Tensor
    step_bias: Tensor
    rates: Tensor
    skips: Tensor
    conv: Tensor
    conv_bias: Tensor | None = None
    norm: Tensor | None = None
    output: Tensor

    @property
    def read(self) -> tuple[Tensor, ...]:
        """What its input is multiplied with."""
        return self.gate, self.mixed, self.step


#: Of a layer that carries a state.
MixerWeights = DeltaWeights | ConvWeights | SpaceWeights
#: Each by what its places in the table begin with.
MIXERS: dict[str, Callable[..., MixerWeights]] = {
    "delta": DeltaWeights,
    "conv": ConvWeights,
    "space": SpaceWeights,
}


def mixer_tensors(arch: Architecture, has: Callable[[str], bool]) -> Iterator[TensorSpec]:
    """The tensors of one layer, without its prefix; `has` says whether its file has one of a
    name."""
    recurrence = arch.recurrence
    assert recurrence is not None
    if isinstance(recurrence, Convolution):
        return _of_convolution(recurrence)
    if isinstance(recurrence, StateSpace):
        return _of_space(arch, recurrence)
    return _of_delta(arch, recurrence, has)


def _of_convolution(recurrence: Convolution) -> Iterator[TensorSpec]:
    width = recurrence.width
    counts = dict.fromkeys(("conv.gate_in", "conv.gate_out", "conv.x"), width)
    yield matrices("shortconv.in_proj.weight", counts, width)
    yield taps("shortconv.conv.weight", "conv.conv", width, recurrence.num_taps)
    yield matrix("shortconv.out_proj.weight", "conv.output", width, width)


def _of_delta(
    arch: Architecture, recurrence: Recurrence, has: Callable[[str], bool]
) -> Iterator[TensorSpec]:
    """Files hold its rates as numbers below 0."""
    family, width = arch.family.recurrence, arch.width
    assert family is not None
    num_heads, num_turns = recurrence.num_value_heads, recurrence.num_key_heads
    mixed, values = recurrence.mixed_width, recurrence.values_width
    if family.joins_steps:
        places, rows = ("delta.beta", "delta.step"), (num_heads, num_heads)
        yield by_turns("ssm_ba.weight", places, rows, width, num_turns)
    else:
        yield matrix("ssm_beta.weight", "delta.beta", num_heads, width)
        yield matrix("ssm_alpha.weight", "delta.step", num_heads, width)
    if family.joins_steps and has("ssm_in.weight"):
        # As first files of Qwen3-Next have it: what a head of keys has of all stands together.
        keys = (mixed - values) // 2
        segments = (keys, keys, values, values)
        yield by_turns("ssm_in.weight", ("delta.qkv", "delta.gate"), segments, width, num_turns)
    else:
        yield matrix("attn_qkv.weight", "delta.qkv", mixed, width)
        yield matrix("attn_gate.weight", "delta.gate", values, width)
    yield vector("ssm_dt.bias", "delta.step_bias", num_heads)
    yield vector("ssm_a", "delta.rates", num_heads)
    yield taps("ssm_conv1d.weight", "delta.conv", mixed, recurrence.num_taps)
    yield vector("ssm_norm.weight", "delta.norm", recurrence.value_dim)
    yield matrix("ssm_out.weight", "delta.output", width, values)


def _of_space(arch: Architecture, space: StateSpace) -> Iterator[TensorSpec]:
    """One matrix of the file makes gates, what is convolved and the steps, in this order."""
    num_heads, values, mixed = space.num_heads, space.values_width, space.mixed_width
    places = ("space.gate", "space.mixed", "space.step")
    yield matrices("ssm_in.weight", dict(zip(places, space.part_rows, strict=True)), arch.width)
    yield vector("ssm_dt.bias", "space.step_bias", num_heads)
    yield vector("ssm_a", "space.rates", num_heads, 1)
    yield vector("ssm_d", "space.skips", num_heads, 1)
    yield taps("ssm_conv1d.weight", "space.conv", mixed, space.num_taps)
    yield vector("ssm_conv1d.bias", "space.conv_bias", mixed, is_optional=True)
    groups = space.num_groups, values // space.num_groups
    yield vector("ssm_norm.weight", "space.norm", *groups, is_optional=True)
    yield matrix("ssm_out.weight", "space.output", arch.width, values)
