"""What layers of all kinds do with a row: norm it, multiply it, gate it, add it to what goes on."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.group import Group
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.collective.collectives import all_reduce
from hypocenter.kernels.linear.linear import linear_several
from hypocenter.kernels.linear.linear_gate import linear_gate_codes
from hypocenter.kernels.linear.operands import Operands, Product, reads_operands_alone
from hypocenter.kernels.linear.quantise import quantise
from hypocenter.kernels.rowwise.activation import activate, activate_codes, gate, gate_codes
from hypocenter.kernels.rowwise.layer_norm import layer_norm, layer_norm_codes
from hypocenter.kernels.rowwise.norm import rms_norm, rms_norm_codes
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.layers.activations import Activations, RotatingOperands
from hypocenter.model.layers.adapting import Adapting
from hypocenter.model.layers.mixture import MixtureBuffers
from hypocenter.model.tensors.table import FeedForward, Mixture


class Norm(NamedTuple):
    """Tensors of a norm: none, a weight alone for a root mean square, or both of a layer norm."""

    weight: Tensor | None
    bias: Tensor | None = None


class BranchEnd(NamedTuple):
    """The weight and bias of the product that ends a branch of the residual stream, the weight of a
    root mean square norm behind it, or a layer norm behind the sum."""

    weight: Tensor
    bias: Tensor | None = None
    norm: Tensor | None = None
    sum_norm: Norm = Norm(None)


def gated_operands(
    arch: Architecture, dtypes: Collection[DType], max_tokens: int, device: str
) -> Operands:
    """What the CPU's gates make at once of their products, for matrices of these types."""
    is_needed = device == "cpu" and arch.dense_width
    return Operands.allocate(
        dtypes if is_needed else (), max_tokens, arch.dense_width, device=device
    )


class LayerOps:
    """Appends them to plans of one model, whose `counts` are those of the step."""

    def __init__(
        self,
        arch: Architecture,
        counts: Tensor,
        operands: Operands,
        gated: Operands,
        group: Group | None = None,
        gathered: Tensor | None = None,
        adapting: Adapting | None = None,
    ) -> None:
        """`operands`: what products read; `gated`: those of `gated_operands`; `group`: those that
        hold the model's other parts, whose sums are gathered in `gathered` where there are more
        than two; `adapting`: what adds to products."""
        self.arch, self._counts, self._group = arch, counts, group
        self._gathered, self._adapting = gathered, adapting
        #: Ops in parts (`settings/routes.py`) where they are usually one launch.
        self.in_parts: frozenset[str] = frozenset()
        #: Ops that plans so far could have in parts and in one launch.
        self.ops_with_parts: set[str] = set()
        self._operands = RotatingOperands(operands)
        #: Apart from those, which other threads still read.
        self._gated = RotatingOperands(gated)

    def _begin_operands(self) -> None:
        """Begin a plan."""
        for turns in (self._operands, self._gated):
            turns.begin()

    def _is_in_parts(self, op: str) -> bool:
        """Whether an op that could be one launch here is to be in parts; keeps that it could."""
        self.ops_with_parts.add(op)
        return op in self.in_parts

    def _gate(
        self, plan: PlanBuilder, x: Tensor, up: Tensor, kind: str, weight: Tensor, width: int
    ) -> Operands | None:
        """What a product with `weight` reads of kind(x) * up: codes or, where there are none, x."""
        codes, counts = self._codes(x, weight), self._counts
        if codes is None or self._is_in_parts("gate"):
            gate(plan, x, up, kind, counts)
            if codes is not None:
                quantise(plan, x, width, codes, counts)
        else:
            gate_codes(plan, x, up, kind, codes, counts, width=width)
        return codes

    def _into_residual(
        self,
        plan: PlanBuilder,
        b: Activations,
        x: Tensor,
        branch: BranchEnd,
        *,
        ready: Operands | None,
        also: bool = False,
        is_last: bool = True,
    ) -> None:
        """b.x += the end of a branch of x, normed first where the family norms what it adds.

        Of several parts of a model each has a sum of its own, and x counts with the first: `also`
        says that this part has put another sum there already, `is_last` that none comes behind it.
        """
        arch, counts = self.arch, self._counts
        if branch.norm is None:
            adds = also or arch.part.is_first
            self._linear(plan, x, (branch.weight, b.x, branch.bias), accumulate=adds, ready=ready)
            if is_last:
                self._reduce(plan, b.x)
            weight, bias = branch.sum_norm
            if weight is not None and bias is not None:
                layer_norm(plan, b.x, weight, bias, arch.norm_eps, b.x, counts, width=arch.width)
            return
        self._linear(plan, x, (branch.weight, b.hidden, branch.bias), ready=ready)
        self._reduce(plan, b.hidden)
        eps, width = arch.norm_eps, arch.width
        rms_norm(plan, b.hidden, branch.norm, eps, b.x, counts, width=width, accumulate=True)

    def _reduce(self, plan: PlanBuilder, x: Tensor) -> None:
        """x = the sum of what all parts of the model have there."""
        if self._group is not None:
            all_reduce(plan, self._group, x, self._counts, self._gathered)

    def _codes(self, x: Tensor, *weights: Tensor) -> Operands | None:
        """Where the codes of rows like x's go that are all that products with `weights` read."""
        if self._adapting is not None and self._adapting.stands_beside(weights):
            return None
        if not reads_operands_alone(weights, self._counts.device):
            return None
        return self._operands.next(x.shape[0])

    def _norm(
        self,
        plan: PlanBuilder,
        x: Tensor,
        norm: Norm,
        hidden: Tensor,
        *weights: Tensor,
        count: int = 0,
    ) -> tuple[Tensor, Operands | None]:
        """What products with `weights` read of x, normed where there is a norm: a tensor, for
        which `hidden` is room, and its codes where these are all of it that they read."""
        counts, eps, width = self._counts, self.arch.norm_eps, self.arch.width
        codes = self._codes(x, *weights)
        weight, bias = norm
        if weight is None:
            if codes is not None:
                quantise(plan, x, width, codes, counts, count=count)
            return x, codes
        if codes is not None and self._is_in_parts("norm"):
            if bias is None:
                rms_norm(plan, x, weight, eps, hidden, counts, width=width, count=count)
            else:
                layer_norm(plan, x, weight, bias, eps, hidden, counts, width=width, count=count)
            quantise(plan, hidden, width, codes, counts, count=count)
            return hidden, codes
        if bias is None and codes is None:
            rms_norm(plan, x, weight, eps, hidden, counts, width=width, count=count)
        elif bias is None:
            assert codes is not None
            rms_norm_codes(plan, x, weight, eps, codes, counts, width=width, count=count)
        elif codes is None:
            layer_norm(plan, x, weight, bias, eps, hidden, counts, width=width, count=count)
        else:
            layer_norm_codes(plan, x, weight, bias, eps, codes, counts, width=width, count=count)
        return hidden, codes

    def _linear(
        self,
        plan: PlanBuilder,
        x: Tensor,
        *products: tuple[Tensor, Tensor, Tensor | None],
        count: int = 0,
        accumulate: bool = False,
        ready: Operands | None = None,
    ) -> None:
        """Products of x with several (weight, out, bias), for which x is made ready once; `ready`
        is what has been made of it already."""
        wanted = [Product(*product) for product in products]
        linear_several(
            plan,
            x,
            wanted,
            self._counts,
            ready or self._operands.next(x.shape[0]),
            count=count,
            accumulate=accumulate,
            is_ready=ready is not None,
        )
        if self._adapting is not None:
            self._adapting.add(plan, x, wanted, count)

    def _gate_up(
        self,
        plan: PlanBuilder,
        b: Activations,
        w: FeedForward,
        x: Tensor,
        x_codes: Operands | None,
        width: int,
    ) -> Operands | None:
        """What `down` reads: codes or, where there are none, b.gate; `x_codes` holds the codes of
        x, where these are all that is read of it."""
        counts, kind = self._counts, self.arch.family.activation
        if w.gate_up is not None:
            assert x_codes is not None
            into = self._gated.next(b.x.shape[0])
            linear_gate_codes(plan, x_codes, w.gate_up, kind, into, counts, width=width)
            return into
        assert w.up is not None
        if w.gate is None:
            self._linear(plan, x, (w.up, b.gate, w.up_bias), ready=x_codes)
            codes = self._codes(b.gate, w.down)
            if codes is None:
                activate(plan, b.gate, kind, counts)
            else:
                activate_codes(plan, b.gate, kind, codes, counts, width=width)
            return codes
        self._linear(plan, x, (w.gate, b.gate, w.gate_bias), (w.up, b.up, w.up_bias), ready=x_codes)
        return self._gate(plan, b.gate, b.up, kind, w.down, width)

    def _mix(
        self, plan: PlanBuilder, b: Activations, norm: Tensor, w: Mixture, mixture: MixtureBuffers
    ) -> None:
        """x += what experts make of x, normed."""
        arch, counts = self.arch, self._counts
        rms_norm(plan, b.x, norm, arch.norm_eps, b.hidden, counts, width=arch.width)
        mixture.choose(plan, b.hidden, w, counts, self._operands.next(b.x.shape[0]))
        mixture.give(plan, b.hidden, w.experts, self._adapting)
        mixture.apply_experts(plan, w.experts, self._adapting)
        if w.shared is not None:
            assert arch.experts is not None
            assert mixture.shared is not None
            b = b.of_width(arch.experts.shared_width)
            x, x_codes = self._norm(plan, b.hidden, Norm(None), b.hidden, *w.shared.read)
            codes = self._gate_up(plan, b, w.shared, x, x_codes, arch.experts.shared_width)
            self._linear(plan, b.gate, (w.shared.down, mixture.shared, None), ready=codes)
        has_shared = w.shared is not None
        adds = arch.part.is_first
        mixture.mix_into(plan, b.x, counts, with_shared=has_shared, accumulate=adds)
        self._reduce(plan, b.x)
