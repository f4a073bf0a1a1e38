"""Which net a decoder's layers with a state are; what each computes stands in its own file."""

from __future__ import annotations

from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.recurrence import Convolution
from hypocenter.model.facts.state_space import StateSpace
from hypocenter.model.layers.conv_net import ConvNet
from hypocenter.model.layers.delta_net import DeltaNet
from hypocenter.model.layers.space_net import SpaceNet
from hypocenter.model.layers.step_buffers import StatePages, StepInputs

#: All have the same methods.
StateNet = DeltaNet | ConvNet | SpaceNet


def allocate_net(
    arch: Architecture, inputs: StepInputs, states: StatePages | None, max_tokens: int
) -> StateNet | None:
    """Makes it with buffers for `max_tokens` tokens; None for a model whose layers carry no state.

    inputs and states are those of the decoder's steps, which must be there where a layer carries a
    state.
    """
    recurrence = arch.recurrence
    if recurrence is None:
        return None
    assert states is not None
    if isinstance(recurrence, Convolution):
        return ConvNet.allocate(recurrence, inputs, states, max_tokens)
    if isinstance(recurrence, StateSpace):
        return SpaceNet.allocate(recurrence, arch.mixer_eps, inputs, states, max_tokens)
    return DeltaNet.allocate(recurrence, arch.mixer_eps, inputs, states, max_tokens)


def first_of(net: StateNet | None, num_tokens: int, num_sequences: int | None) -> StateNet | None:
    """The same net for a bucket of `num_tokens` tokens of `num_sequences` sequences (any number
    when None)."""
    return None if net is None else net.first(num_tokens, num_sequences)
