"""The Gated Delta Net of a layer: its static buffers, and its ops in their order.

All layers and plans share the buffers; what each sequence carries is in `step_buffers.StatePages`.
Products before and behind it are the decoder's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.memory import allocate, rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.recurrent.delta_rule import delta_rule
from hypocenter.kernels.recurrent.sequences import Sequences
from hypocenter.kernels.recurrent.short_conv import short_conv
from hypocenter.kernels.rowwise.norm import rms_norm
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.recurrence import Recurrence
from hypocenter.model.layers.step_buffers import StatePages, StepInputs
from hypocenter.model.tensors.mixer_weights import DeltaWeights, MixerWeights


@dataclass(frozen=True, slots=True)
class DeltaBuffers:
    """Activations f32 [max_tokens, width padded to 64]: what the convolution reads and gives, gates
    of the result, both numbers of each head, and the result."""

    mixed: Tensor
    convolved: Tensor
    gate: Tensor
    betas: Tensor
    steps: Tensor
    out: Tensor

    @classmethod
    def allocate(cls, recurrence: Recurrence, max_tokens: int, *, device: str) -> DeltaBuffers:
        def wide(name: str, width: int) -> Tensor:
            shape = (max_tokens, padded_rows(width))
            return allocate(name, "decoder", DType.F32, shape, device=device)

        return cls(
            mixed=wide("mixed", recurrence.mixed_width),
            convolved=wide("convolved", recurrence.mixed_width),
            gate=wide("delta_gate", recurrence.values_width),
            betas=wide("betas", recurrence.num_value_heads),
            steps=wide("steps", recurrence.num_value_heads),
            out=wide("delta_out", recurrence.values_width),
        )

    def first(self, num_rows: int) -> DeltaBuffers:
        return DeltaBuffers(*(rows(getattr(self, name), 0, num_rows) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """The recurrent layers of a decoder, for steps of up to `num_sequences` sequences (as many as
    there may be when None)."""

    recurrence: Recurrence
    eps: float
    buffers: DeltaBuffers
    states: StatePages
    sequences: Sequences
    num_sequences: int | None = None
    #: How its gate counts.
    gate_kind: str = "silu"

    @classmethod
    def allocate(
        cls,
        recurrence: Recurrence,
        eps: float,
        inputs: StepInputs,
        states: StatePages,
        max_tokens: int,
    ) -> DeltaNet:
        buffers = DeltaBuffers.allocate(recurrence, max_tokens, device=inputs.counts.device)
        return cls(recurrence, eps, buffers, states, inputs.sequences)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.recurrence.values_width

    def first(self, num_tokens: int, num_sequences: int | None) -> DeltaNet:
        """The same for a bucket of `num_tokens` tokens."""
        buffers = self.buffers.first(num_tokens)
        return replace(self, buffers=buffers, num_sequences=num_sequences)

    def products(self, w: MixerWeights) -> tuple[tuple[Tensor, Tensor, None], ...]:
        """Weights that a layer's input is multiplied with, and where the results go."""
        assert isinstance(w, DeltaWeights)
        b = self.buffers
        return (
            (w.qkv, b.mixed, None),
            (w.gate, b.gate, None),
            (w.beta, b.betas, None),
            (w.step, b.steps, None),
        )

    def apply(self, plan: PlanBuilder, index: int, w: MixerWeights) -> tuple[Tensor, Tensor]:
        """Append what layer `index` makes of the products; its gates, and the result by head,
        normed, which they are to let through."""
        assert isinstance(w, DeltaWeights)
        b, num_sequences = self.buffers, self.num_sequences
        sequences, recurrence = self.sequences, self.recurrence
        conv, state = self.states.convs[index], self.states.states[index]
        short_conv(plan, b.mixed, w.conv, conv, b.convolved, sequences, num_sequences=num_sequences)
        delta_rule(
            plan,
            b.convolved,
            b.betas,
            b.steps,
            w.step_bias,
            w.rates,
            state,
            b.out,
            sequences,
            heads=recurrence.heads,
            num_sequences=num_sequences,
        )
        rms_norm(
            plan,
            b.out,
            w.norm,
            self.eps,
            b.out,
            sequences.counts,
            width=recurrence.value_dim,
            num_heads=recurrence.num_value_heads,
        )
        return b.gate, b.out
