"""The mixture of experts of a layer: its static buffers, and its ops in their order.

All layers and plans share the buffers. Which experts a step takes is decided where it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.memory import allocate, rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.experts.experts import experts_gate_codes, experts_linear
from hypocenter.kernels.experts.experts_table import ExpertsShape, ExpertsTable
from hypocenter.kernels.experts.grouping import group
from hypocenter.kernels.experts.mixing import mix
from hypocenter.kernels.experts.routing import route
from hypocenter.kernels.linear.linear import linear_several
from hypocenter.kernels.linear.operands import Operands, Product, reads_operands_alone
from hypocenter.kernels.linear.quantise import gather_operands, prepare_operands
from hypocenter.kernels.rowwise.activation import gate, gate_codes
from hypocenter.kernels.rowwise.embedding import gather
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.experts import Experts
from hypocenter.model.layers.adapting import Adapting
from hypocenter.model.tensors.table import FeedForward, Mixture


@dataclass(frozen=True, slots=True)
class MixtureBuffers:
    """logits f32 [max_tokens, experts padded to 64]; sorted_x f32 [sorted rows, width], what
    experts read and later what they give; gate and up f32 [sorted rows, width of an expert], None
    where codes are made at once; shared f32 [max_tokens, width], None where nothing is shared;
    operands and gated: what is made of sorted_x and of the gated result. Beside a dense
    feed-forward `shared` holds what that one gives."""

    experts: Experts
    width: int
    activation: str
    table: ExpertsTable
    logits: Tensor
    sorted_x: Tensor
    gate: Tensor | None
    up: Tensor | None
    shared: Tensor | None
    operands: Operands
    gated: Operands
    of_one_token: ExpertsTable | None

    @classmethod
    def allocate(
        cls,
        arch: Architecture,
        mixtures: Iterable[Mixture],
        max_tokens: int,
        *,
        device: str,
        in_bf16: bool,
    ) -> MixtureBuffers | None:
        """What layers with these mixtures want; None where there are none."""
        experts, stacks = arch.experts, [mixture.experts for mixture in mixtures]
        if experts is None or not stacks:
            return None
        choice = experts.choice
        shape = ExpertsShape(max_tokens, choice.num_experts, choice.num_used, device)

        def floats(name: str, num_rows: int, width: int) -> Tensor:
            sizes = (num_rows, padded_rows(width))
            return allocate(name, "decoder", DType.F32, sizes, device=device)

        def operands(weights: Iterable[Tensor], width: int) -> Operands:
            dtypes = {weight.dtype for weight in weights}
            return Operands.allocate(dtypes, shape.num_rows, width, device=device, in_bf16=in_bf16)

        is_split = any(stack.gate_up is None for stack in stacks)
        downs = [stack.down for stack in stacks]
        table = ExpertsTable.allocate(shape)
        has_shared = experts.shared_width > 0 or arch.is_dense(arch.num_layers - 1)
        return cls(
            experts=experts,
            width=arch.width,
            activation=arch.family.activation,
            table=table,
            logits=floats("router_logits", max_tokens, choice.num_experts + choice.has_gate),
            sorted_x=floats("expert_rows", shape.num_rows, arch.width),
            gate=floats("expert_gate", shape.num_rows, experts.width) if is_split else None,
            up=floats("expert_up", shape.num_rows, experts.width) if is_split else None,
            shared=floats("shared", max_tokens, arch.width) if has_shared else None,
            operands=operands((weight for stack in stacks for weight in stack.read), arch.width),
            gated=operands(downs, experts.width),
            of_one_token=None if device == "cpu" else table.of_one_token(),
        )

    def first(self, num_tokens: int) -> MixtureBuffers:
        """The same buffers for a bucket of `num_tokens` tokens."""
        table = self.of_one_token if num_tokens == 1 else None
        table = table or self.table.first(num_tokens)
        num_rows, tile = table.shape.num_rows, table.shape.tile

        def some(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else rows(tensor, 0, num_rows)

        return MixtureBuffers(
            experts=self.experts,
            width=self.width,
            activation=self.activation,
            table=table,
            logits=rows(self.logits, 0, num_tokens),
            sorted_x=rows(self.sorted_x, 0, num_rows),
            gate=some(self.gate),
            up=some(self.up),
            shared=None if self.shared is None else rows(self.shared, 0, num_tokens),
            operands=self.operands.first(num_rows, tile=tile),
            gated=self.gated.first(num_rows, tile=tile),
            of_one_token=self.of_one_token,
        )

    def choose(
        self,
        plan: PlanBuilder,
        hidden: Tensor,
        weights: Mixture,
        counts: Tensor,
        operands: Operands,
    ) -> None:
        """Append which experts the tokens of `hidden` take, and where their rows lie."""
        router = Product(weights.router, self.logits, weights.router_bias)
        linear_several(plan, hidden, [router], counts, operands)
        route(
            plan,
            self.logits,
            self.experts.choice,
            self.table,
            counts,
            bias=weights.bias,
            factors=weights.factors,
        )
        if not self.table.is_fixed:
            group(plan, self.table, counts)

    def give(
        self, plan: PlanBuilder, hidden: Tensor, weights: FeedForward, adapting: Adapting | None
    ) -> None:
        """Append what experts, and adapters beside them, read of the rows of `hidden`."""
        table, into = self.table, self.operands
        if adapting is not None and adapting.stands_beside(weights.read):
            gather(plan, hidden, table.sources, self.sorted_x, table.counts)
            prepare_operands(plan, self.sorted_x, weights.read, into, table.counts, count=1)
            return
        gather_operands(
            plan, hidden, table.sources, weights.read, into, table.counts, self.sorted_x
        )

    def apply_experts(
        self, plan: PlanBuilder, weights: FeedForward, adapting: Adapting | None
    ) -> None:
        """Append the feed-forward of each sorted row, by its expert and by what stands beside."""
        table, x = self.table, self.sorted_x
        down = Product(weights.down, x, weights.down_bias)
        if weights.gate_up is not None:
            experts_gate_codes(
                plan,
                self.operands,
                weights.gate_up,
                self.activation,
                self.gated,
                table,
                width=self.experts.width,
            )
            experts_linear(plan, x, [down], table, self.gated)
            return
        assert weights.gate is not None
        assert weights.up is not None
        assert self.gate is not None
        assert self.up is not None
        both = (
            Product(weights.gate, self.gate, weights.gate_bias),
            Product(weights.up, self.up, weights.up_bias),
        )
        experts_linear(plan, x, both, table, self.operands)
        if adapting is not None:
            adapting.add_of_experts(plan, x, both, table)
        is_adapted = adapting is not None and adapting.stands_beside([weights.down])
        if reads_operands_alone([weights.down], plan.device) and not is_adapted:
            gate_codes(
                plan,
                self.gate,
                self.up,
                self.activation,
                self.gated,
                table.counts,
                width=self.experts.width,
            )
        else:
            gate(plan, self.gate, self.up, self.activation, table.counts)
            prepare_operands(plan, self.gate, [weights.down], self.gated, table.counts)
        experts_linear(plan, self.gate, [down], table, self.gated)
        if adapting is not None:
            adapting.add_of_experts(plan, self.gate, [down], table)

    def mix_into(
        self, plan: PlanBuilder, x: Tensor, counts: Tensor, *, with_shared: bool, accumulate: bool
    ) -> None:
        """Append x (+)= what the experts give, and the shared one where that is wanted."""
        shared = self.shared if with_shared else None
        mix(
            plan,
            x,
            self.sorted_x,
            self.table,
            counts,
            width=self.width,
            shared=shared,
            accumulate=accumulate,
        )
