"""The state space of a layer (Mamba-2): its static buffers, and its ops in their order.

All layers and plans share the buffers; what each sequence carries is in `step_buffers.StatePages`.
Products before and behind it are the decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.memory import allocate, rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.recurrent.sequences import Sequences
from hypocenter.kernels.recurrent.short_conv import short_conv
from hypocenter.kernels.recurrent.ssm_scan import ssm_scan
from hypocenter.kernels.rowwise.gate_norm import gate_norm
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.state_space import StateSpace
from hypocenter.model.layers.step_buffers import StatePages, StepInputs
from hypocenter.model.tensors.mixer_weights import MixerWeights, SpaceWeights


@dataclass(frozen=True, slots=True)
class SpaceBuffers:
    """Activations f32 [max_tokens, width padded to 64]: what the convolution reads and gives, gates
    of the result, a number of each head, and the result."""

    mixed: Tensor
    convolved: Tensor
    gate: Tensor
    steps: Tensor
    out: Tensor

    @classmethod
    def allocate(cls, space: StateSpace, max_tokens: int, *, device: str) -> SpaceBuffers:
        def wide(name: str, width: int) -> Tensor:
            shape = (max_tokens, padded_rows(width))
            return allocate(name, "decoder", DType.F32, shape, device=device)

        return cls(
            mixed=wide("mixed", space.mixed_width),
            convolved=wide("convolved", space.mixed_width),
            gate=wide("space_gate", space.values_width),
            steps=wide("steps", space.num_heads),
            out=wide("space_out", space.values_width),
        )

    def first(self, num_rows: int) -> SpaceBuffers:
        return SpaceBuffers(*(rows(getattr(self, name), 0, num_rows) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class SpaceNet:
    """The state spaces of a decoder, for steps of up to `num_sequences` sequences (as many as there
    may be when None)."""

    space: StateSpace
    eps: float
    buffers: SpaceBuffers
    states: StatePages
    sequences: Sequences
    num_sequences: int | None = None
    #: How its gate counts, where that is left to be done.
    gate_kind: str = "silu"

    @classmethod
    def allocate(
        cls, space: StateSpace, eps: float, inputs: StepInputs, states: StatePages, max_tokens: int
    ) -> SpaceNet:
        buffers = SpaceBuffers.allocate(space, max_tokens, device=inputs.counts.device)
        return cls(space, eps, buffers, states, inputs.sequences)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.space.values_width

    def first(self, num_tokens: int, num_sequences: int | None) -> SpaceNet:
        """The same for a bucket of `num_tokens` tokens."""
        buffers = self.buffers.first(num_tokens)
        return replace(self, buffers=buffers, num_sequences=num_sequences)

    def products(self, w: MixerWeights) -> tuple[tuple[Tensor, Tensor, None], ...]:
        """Weights that a layer's input is multiplied with, and where the results go."""
        assert isinstance(w, SpaceWeights)
        b = self.buffers
        return (w.gate, b.gate, None), (w.mixed, b.mixed, None), (w.step, b.steps, None)

    def apply(self, plan: PlanBuilder, index: int, w: MixerWeights) -> tuple[Tensor, Tensor | None]:
        """Append what layer `index` makes of the products: its gates, and the result, which they
        are to let through; where that is normed behind the gates, it alone."""
        assert isinstance(w, SpaceWeights)
        b, space, num_sequences = self.buffers, self.space, self.num_sequences
        sequences, conv = self.sequences, self.states.convs[index]
        short_conv(
            plan,
            b.mixed,
            w.conv,
            conv,
            b.convolved,
            sequences,
            bias=w.conv_bias,
            num_sequences=num_sequences,
        )
        ssm_scan(
            plan,
            b.convolved,
            b.steps,
            w.step_bias,
            w.rates,
            w.skips,
            self.states.states[index],
            b.out,
            sequences,
            heads=space.heads,
            num_sequences=num_sequences,
        )
        if w.norm is None:
            return b.gate, b.out
        gate_norm(
            plan,
            b.gate,
            b.out,
            w.norm,
            self.eps,
            sequences.counts,
            width=space.values_width // space.num_groups,
            num_groups=space.num_groups,
        )
        return b.gate, None
