"""The gated short convolution of a layer: its static buffers, and its ops in their order.

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
from hypocenter.kernels.rowwise.activation import gate
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.recurrence import Convolution
from hypocenter.model.layers.step_buffers import StatePages, StepInputs
from hypocenter.model.tensors.mixer_weights import ConvWeights, MixerWeights


@dataclass(frozen=True, slots=True)
class ConvBuffers:
    """Activations f32 [max_tokens, width padded to 64]: what gates the input, and the input gated;
    the input; the result; and what gates that."""

    gate_in: Tensor
    x: Tensor
    convolved: Tensor
    gate_out: Tensor

    @classmethod
    def allocate(cls, width: int, max_tokens: int, *, device: str) -> ConvBuffers:
        shape = (max_tokens, padded_rows(width))
        names = ("conv_gate_in", "conv_x", "convolved", "conv_gate_out")
        return cls(*(allocate(name, "decoder", DType.F32, shape, device=device) for name in names))

    def first(self, num_rows: int) -> ConvBuffers:
        return ConvBuffers(*(rows(getattr(self, name), 0, num_rows) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class ConvNet:
    """The layers of a decoder that are short convolutions, for steps of up to `num_sequences`
    sequences (as many as there may be when None)."""

    recurrence: Convolution
    buffers: ConvBuffers
    states: StatePages
    sequences: Sequences
    num_sequences: int | None = None
    #: How its gate counts.
    gate_kind: str = "plain"

    @classmethod
    def allocate(
        cls, recurrence: Convolution, inputs: StepInputs, states: StatePages, max_tokens: int
    ) -> ConvNet:
        device = inputs.counts.device
        buffers = ConvBuffers.allocate(recurrence.width, max_tokens, device=device)
        return cls(recurrence, buffers, states, inputs.sequences)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.recurrence.width

    def first(self, num_tokens: int, num_sequences: int | None) -> ConvNet:
        """The same for a bucket of `num_tokens` tokens."""
        buffers = self.buffers.first(num_tokens)
        return replace(self, buffers=buffers, num_sequences=num_sequences)

    def products(self, w: MixerWeights) -> tuple[tuple[Tensor, Tensor, None], ...]:
        """Weights that a layer's input is multiplied with, and where the results go."""
        assert isinstance(w, ConvWeights)
        b = self.buffers
        return (w.gate_in, b.gate_in, None), (w.gate_out, b.gate_out, None), (w.x, b.x, None)

    def apply(self, plan: PlanBuilder, index: int, w: MixerWeights) -> tuple[Tensor, Tensor]:
        """Append what layer `index` makes of the products: its gates, and the result, which they
        are to let through."""
        assert isinstance(w, ConvWeights)
        b, sequences, conv = self.buffers, self.sequences, self.states.convs[index]
        gate(plan, b.gate_in, b.x, "plain", sequences.counts)
        short_conv(
            plan,
            b.gate_in,
            w.conv,
            conv,
            b.convolved,
            sequences,
            activates=False,
            num_sequences=self.num_sequences,
        )
        return b.gate_out, b.convolved
