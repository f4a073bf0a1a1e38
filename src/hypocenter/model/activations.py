"""The static buffers of a step's activations, which all layers and plans of a decoder share."""

from __future__ import annotations

from dataclasses import dataclass

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

    @classmethod
    def allocate(cls, facts: Architecture, max_tokens: int, *, device: str) -> Activations:
        def wide(name: str, width: int) -> Tensor:
            return allocate(
                name, "decoder", DType.F32, (max_tokens, padded_rows(width)), device=device
            )

        heads, kv_heads = facts.widest_q, facts.widest_kv
        return cls(
            x=wide("x", facts.width),
            hidden=wide("hidden", facts.width),
            q=wide("q", heads),
            k=wide("k", kv_heads),
            v=wide("v", kv_heads),
            attended=wide("attended", heads),
            gate=wide("gate", facts.dense_width),
            up=wide("up", facts.dense_width),
        )

    def first(self, num_rows: int) -> Activations:
        return Activations(*(rows(getattr(self, name), 0, num_rows) for name in self.__slots__))


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
