"""What adapters add to products, in steps of which a request has some; other plans know nothing of
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.memory import allocate, rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.experts.experts_adapter import experts_adapter
from hypocenter.kernels.experts.experts_table import ExpertsTable
from hypocenter.kernels.linear.adapter import adapter_down, adapter_up
from hypocenter.kernels.linear.operands import Product
from hypocenter.kernels.rowwise.embedding import lookup
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.layers.step_buffers import StepInputs
from hypocenter.model.tensors.table import Adapted


class Adapting:
    """Adapters beside the weights of a decoder, by the `id` of these, and scratch of all plans."""

    def __init__(
        self,
        placed: Mapping[int, Adapted],
        inputs: StepInputs,
        max_tokens: int,
        num_experts_used: int = 1,
    ) -> None:
        self._placed, self._inputs, self._is_on = placed, inputs, False
        most = max(
            beside.num_ranks * (num_experts_used if beside.is_of_experts else 1)
            for beside in placed.values()
        )
        shape, device = (max_tokens, most), inputs.counts.device
        #: Of each row, or each choice of experts of a token, its products with ranks, scaled.
        self._products = allocate("adapter_products", "decoder", DType.F32, shape, device=device)
        tables = [beside.table for beside in placed.values() if beside.table is not None]
        #: Of each token its row of A beside the token table, where an adapter has one.
        self._looked_up: Tensor | None = None
        if tables:
            shape = (max_tokens, padded_rows(tables[0].shape[1]))
            self._looked_up = allocate("adapter_rows", "decoder", DType.F32, shape, device=device)

    def begin(self, *, is_adapted: bool) -> None:
        """Begin a plan of steps that have adapters, or of others."""
        self._is_on = is_adapted

    def beside(self, weights: Iterable[Tensor]) -> tuple[Adapted | None, ...]:
        """What stands beside each of these weights."""
        return tuple(self._placed.get(id(weight)) for weight in weights)

    def stands_beside(self, weights: Iterable[Tensor]) -> bool:
        """Whether x itself is read in this plan beside products with these weights."""
        return self._is_on and any(id(weight) in self._placed for weight in weights)

    def add(self, plan: PlanBuilder, x: Tensor, products: Iterable[Product], count: int) -> None:
        """Append what is added to products of x, of tokens (`count` 0) or of logit rows (1)."""
        for product in products:
            if self.stands_beside([product.weight]):
                self._add_one(plan, x, self._placed[id(product.weight)], product.out, count)

    def add_of_experts(
        self, plan: PlanBuilder, x: Tensor, products: Iterable[Product], table: ExpertsTable
    ) -> None:
        """Append what is added to products of the sorted rows of x with experts."""
        for product in products:
            if self.stands_beside([product.weight]):
                beside, inputs = self._placed[id(product.weight)], self._inputs
                assert inputs.adapter_scales is not None
                experts_adapter(
                    plan,
                    x,
                    beside.down,
                    beside.up,
                    product.out,
                    rows(self._products, 0, table.ids.shape[0]),
                    table,
                    owners=beside.owners,
                    factors=beside.factors,
                    scales=inputs.adapter_scales,
                    sequences=inputs.sequence_rows,
                    counts=inputs.counts,
                    num_columns=beside.num_columns,
                )

    def add_embedding(self, plan: PlanBuilder, token_table: Tensor, out: Tensor) -> None:
        """Append what is added to the rows of the token table, where they are looked up."""
        beside = self._placed.get(id(token_table)) if self._is_on else None
        if beside is None or beside.table is None:
            return
        assert self._looked_up is not None
        looked_up = rows(self._looked_up, 0, out.shape[0])
        lookup(plan, self._inputs.token_ids, beside.table, looked_up, self._inputs.counts)
        self._add_one(plan, looked_up, beside, out, 0)

    def _add_one(
        self, plan: PlanBuilder, x: Tensor, beside: Adapted, out: Tensor, count: int
    ) -> None:
        inputs = self._inputs
        assert inputs.adapter_scales is not None
        assert inputs.logit_sequences is not None
        sequences = inputs.logit_sequences if count else inputs.sequence_rows
        of_ranks = rows(self._products, 0, x.shape[0])
        adapter_down(
            plan,
            x,
            beside.down,
            of_ranks,
            owners=beside.owners,
            factors=beside.factors,
            scales=inputs.adapter_scales,
            sequences=sequences,
            counts=inputs.counts,
            num_columns=beside.num_columns,
            count=count,
        )
        adapter_up(
            plan,
            of_ranks,
            beside.up,
            out,
            owners=beside.owners,
            scales=inputs.adapter_scales,
            sequences=sequences,
            counts=inputs.counts,
            count=count,
        )
