"""The static buffers of a step's activations and logits, which all plans of a decoder share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.group import Group
from hypocenter.device.memory import allocate, rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.collective.collectives import all_gather, gathered_rows, join
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.rowwise.activation import scale, softcap
from hypocenter.kernels.rowwise.embedding import narrow
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture


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
    attn_gate: Tensor
    #: gate and up of feed-forwards that are narrower, for what lies behind their columns is stale.
    narrower: tuple[tuple[Tensor, Tensor], ...] = ()
    #: What layers that have an embedding of their own read: of each what a projection makes of the
    #: token's, then a row of the layer's table, and what lets it through.
    layer_inputs: tuple[Tensor, ...] = ()
    token_input: Tensor | None = None
    gated_input: Tensor | None = None

    @classmethod
    def allocate(cls, arch: Architecture, max_tokens: int, *, device: str) -> Activations:
        def wide(name: str, width: int) -> Tensor:
            return allocate(
                name, "decoder", DType.F32, (max_tokens, padded_rows(width)), device=device
            )

        heads, kv_heads = arch.widest_q, arch.widest_kv

        def both(width: int) -> tuple[Tensor, Tensor]:
            return wide("gate", width), wide("up", width)

        inner = arch.input_width
        gate, up = both(arch.dense_width)
        return cls(
            x=wide("x", arch.width),
            hidden=wide("hidden", arch.width),
            q=wide("q", heads),
            k=wide("k", kv_heads),
            v=wide("v", kv_heads),
            attended=wide("attended", arch.widest_attended),
            gate=gate,
            up=up,
            attn_gate=wide("attn_gate", heads if arch.family.gates_attention else 0),
            narrower=tuple(both(width) for width in arch.dense_widths[1:]),
            layer_inputs=tuple(
                wide(f"layer_input.{index}", inner) for index in range(arch.num_layers) if inner
            ),
            token_input=wide("token_input", inner) if inner else None,
            gated_input=wide("gated_input", inner) if inner else None,
        )

    def first(self, num_rows: int) -> Activations:
        """The same buffers for a bucket of so many tokens."""
        return Activations(*(_first(getattr(self, name), num_rows) for name in self.__slots__))

    def of_width(self, width: int) -> Activations:
        """The same with gate and up for a feed-forward of that width."""
        pairs = (self.gate, self.up), *self.narrower
        gate, up = next(pair for pair in pairs if pair[0].shape[1] == padded_rows(width))
        return replace(self, gate=gate, up=up)


def allocate_gathered(arch: Architecture, max_tokens: int, device: str) -> Tensor | None:
    """Where rows as wide as x of all parts are gathered, if that is how they are added."""
    num_rows = gathered_rows(arch.part.num_parts, max_tokens)
    shape = num_rows, padded_rows(arch.width)
    return allocate("gathered", "decoder", DType.F32, shape, device=device) if num_rows else None


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


class LogitsBuffers:
    """Rows of logits that all plans share, for a result is valid until the next run only."""

    def __init__(
        self, arch: Architecture, most_requests: int, device: str, group: Group | None = None
    ) -> None:
        """`group`: those that hold the other parts of the model, if it has any."""
        self._arch, self._most_requests, self._device = arch, most_requests, device
        self._group, self._num_columns = group, arch.part.share_of(arch.vocab_size)
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def product(self, num_rows: int) -> Tensor:
        """Where the product goes, f32 [num_rows, the part's tokens padded to 64]."""
        return self._rows("logits", num_rows, padded_rows(self._num_columns))

    def finish(self, plan: PlanBuilder, logits: Tensor, counts: Tensor) -> Tensor:
        """Append what makes logits of the product: f32 [num_rows, vocab_size]."""
        arch = self._arch
        if arch.logit_scale != 1:
            scale(plan, logits, 1 / arch.logit_scale, counts, count=1)
        if arch.final_softcap:
            softcap(plan, logits, arch.final_softcap, counts, count=1)
        if self._group is not None and self._num_columns != arch.vocab_size:
            return self._join_parts(plan, self._group, logits, counts)
        if arch.vocab_size == logits.shape[1]:
            return logits
        # Padding has the logit 0, which a sampler would take for a token.
        narrowed = self._rows("logits", logits.shape[0], arch.vocab_size)
        narrow(plan, logits, narrowed, counts)
        return narrowed

    def _join_parts(self, plan: PlanBuilder, group: Group, part: Tensor, counts: Tensor) -> Tensor:
        """The logits of all parts, each of which has made some columns."""
        num_rows = part.shape[0]
        parts = self._rows("logits of parts", group.num_ranks * num_rows, part.shape[1])
        all_gather(plan, group, part, parts)
        logits = self._rows("logits", num_rows, self._arch.vocab_size)
        join(plan, parts, logits, counts, num_columns=self._num_columns)
        return logits

    def _rows(self, name: str, num_rows: int, width: int) -> Tensor:
        """A buffer grows when a plan wants more; the few smaller ones live on in the plans that
        have them."""
        buffer = self._buffers.get((name, width))
        if buffer is None or buffer.shape[0] < num_rows:
            shape = (max(num_rows, self._most_requests), width)
            buffer = allocate(name, "decoder", DType.F32, shape, device=self._device)
            self._buffers[name, width] = buffer
        return rows(buffer, 0, num_rows)
