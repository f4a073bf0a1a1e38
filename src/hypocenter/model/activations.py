"""The static buffers of a step's activations, which all layers and plans of a decoder share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypocenter.device.memory import allocate, rows
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.architecture import Architecture
from hypocenter.tensor import DType, Tensor


@dataclass(frozen=True, slots=True)
class Activations:
    """Activations f32 [max_tokens, width padded to 64], shared by all layers and plans."""

    x: Tensor
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attended: Tensor
    gate: Tensor
    up: Tensor
    #: gate and up of feed-forwards that are narrower, for what lies behind their columns is stale.
    narrower: tuple[tuple[Tensor, Tensor], ...] = ()
    #: What layers that have an embedding of their own read: of each what a projection makes of the
    #: token's, then a row of the layer's table, and what lets it through.
    layer_inputs: tuple[Tensor, ...] = ()
    token_input: Tensor | None = None
    gated_input: Tensor | None = None

    @classmethod
    def allocate(cls, facts: Architecture, max_tokens: int, *, device: str) -> Activations:
        def wide(name: str, width: int) -> Tensor:
            return allocate(
                name, "decoder", DType.F32, (max_tokens, padded_rows(width)), device=device
            )

        heads, kv_heads = facts.widest_q, facts.widest_kv

        def both(width: int) -> tuple[Tensor, Tensor]:
            return wide("gate", width), wide("up", width)

        inner = facts.input_width
        gate, up = both(facts.dense_width)
        return cls(
            x=wide("x", facts.width),
            hidden=wide("hidden", facts.width),
            q=wide("q", heads),
            k=wide("k", kv_heads),
            v=wide("v", kv_heads),
            attended=wide("attended", heads),
            gate=gate,
            up=up,
            narrower=tuple(both(width) for width in facts.dense_widths[1:]),
            layer_inputs=tuple(
                wide(f"layer_input.{index}", inner) for index in range(facts.num_layers) if inner
            ),
            token_input=wide("token_input", inner) if inner else None,
            gated_input=wide("gated_input", inner) if inner else None,
        )

    def first(self, num_rows: int) -> Activations:
        """The same buffers for a bucket of so many tokens."""
        return Activations(*(_first(getattr(self, name), num_rows) for name in self.__slots__))

    def of_width(self, width: int) -> Activations:
        """With gate and up for a feed-forward of that width."""
        pairs = (self.gate, self.up), *self.narrower
        gate, up = next(pair for pair in pairs if pair[0].shape[1] == padded_rows(width))
        return replace(self, gate=gate, up=up)


def _first(buffers: Any, num_rows: int) -> Any:
    """The first rows of a tensor, or of all in a tuple."""
    if isinstance(buffers, tuple):
        return tuple(_first(buffer, num_rows) for buffer in buffers)
    return buffers if buffers is None else rows(buffers, 0, num_rows)


class RotatingOperands:
    """Hands out operands for one activation after the other of a plan."""

    def __init__(self, operands: Operands) -> None:
        self.operands, self._num_turns = operands, 0

    def begin(self) -> None:
        """Begin a plan: its launches do not depend on which were made before."""
        self._num_turns = 0

    def next(self, num_rows: int) -> Operands:
        self._num_turns += 1
        return self.operands.first(num_rows, self._num_turns)
