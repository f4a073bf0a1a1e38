"""What happens to q, k and v between their products and attention; computes no attention itself."""

from __future__ import annotations

from hypocenter.base.tensor import Tensor
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention.kv_write import kv_write
from hypocenter.kernels.attention.rope import rotate
from hypocenter.kernels.attention.rope_write import HeadNorms, rope_write
from hypocenter.kernels.rowwise.hadamard import hadamard, size_for
from hypocenter.kernels.rowwise.layer_norm import layer_norm
from hypocenter.kernels.rowwise.norm import rms_norm
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.layers.activations import Activations
from hypocenter.model.layers.step_buffers import StepInputs
from hypocenter.model.tensors.rope_tables import RopeTables
from hypocenter.model.tensors.table import LayerWeights


class Heads:
    """Norms heads, turns them by their positions, and puts k and v into the cache."""

    def __init__(
        self,
        arch: Architecture,
        ropes: RopeTables,
        inputs: StepInputs,
        *,
        is_fused: bool,
        uses_hadamard: bool,
    ) -> None:
        """`is_fused`: turning and writing may be one launch. `uses_hadamard`: keys and values go
        through `hadamard` before they are written."""
        self._arch, self._ropes, self._inputs, self._is_fused = arch, ropes, inputs, is_fused
        #: Whether they are two launches all the same, and whether that is another form in plans so
        #: far.
        self.in_parts = self.has_parts = False
        self._uses_hadamard = uses_hadamard

    def prepare(
        self,
        plan: PlanBuilder,
        b: Activations,
        index: int,
        w: LayerWeights,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Append what makes queries of b.q, and keys and values in pages of b.k and b.v."""
        if w.v_norm is not None:
            source = b.k if w.v is None else b.v
            self._norm(plan, source, w.v_norm, b.v, index, self._arch.layers[index].num_kv_heads)
        arch, has_own = self._arch, self._arch.layers[index].kv_source is None
        is_alike = self._ropes.query is None and not arch.family.norms_after_rope and has_own
        # Blocks are made of heads that have been rotated whole.
        if arch.is_rotated(index) and is_alike and self._is_fused and not keys.dtype.is_quantised:
            self.has_parts = True
            if not self.in_parts:
                self._write_at_once(plan, b, index, w, keys, values)
                return
        if not arch.family.norms_after_rope:
            self._norm_both(plan, b, index, w)
        self._turn_and_write(plan, b, index, w, keys, values)

    def _table(self, index: int) -> tuple[Tensor, Tensor]:
        is_local = self._arch.is_local(index)
        return self._ropes.local if is_local else self._ropes.whole

    def _write_at_once(
        self,
        plan: PlanBuilder,
        b: Activations,
        index: int,
        w: LayerWeights,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """q normed and rotated, and k, as well, and v in the cache, by one launch on a GPU."""
        arch, inputs = self._arch, self._inputs
        norms = None
        if w.q_norm is not None or w.k_norm is not None:
            if arch.family.wide_qk_norm or arch.family.norms_by_head:
                self._norm_both(plan, b, index, w)
            else:
                norms = HeadNorms(w.q_norm, w.k_norm, arch.norm_eps)
        rope_write(
            plan,
            b.q,
            b.k,
            b.v,
            inputs.positions,
            inputs.slots,
            self._table(index),
            keys,
            values,
            inputs.counts,
            num_heads=arch.num_heads,
            head_dim=arch.layers[index].head_dim,
            style=arch.family.rope_style,
            norms=norms,
        )

    def _norm_both(self, plan: PlanBuilder, b: Activations, index: int, w: LayerWeights) -> None:
        """q and k normed, where they are."""
        arch = self._arch
        for x, norm, num_heads in (
            (b.q, w.q_norm, arch.num_heads),
            (b.k, w.k_norm, arch.layers[index].num_kv_heads),
        ):
            if norm is not None and arch.family.norms_by_head:
                assert w.head_norm_bias is not None
                layer_norm(
                    plan,
                    x,
                    norm,
                    w.head_norm_bias,
                    arch.norm_eps,
                    x,
                    self._inputs.counts,
                    width=arch.layers[index].head_dim,
                    num_heads=num_heads,
                )
            elif norm is not None:
                self._norm(plan, x, norm, x, index, num_heads)

    def _norm(
        self, plan: PlanBuilder, x: Tensor, norm: Tensor, out: Tensor, index: int, num_heads: int
    ) -> None:
        """out = x, normed head by head or all heads together."""
        counts, width = self._inputs.counts, self._arch.layers[index].head_dim
        if self._arch.family.wide_qk_norm:
            width, num_heads = num_heads * width, 1
        eps = self._arch.norm_eps
        rms_norm(plan, x, norm, eps, out, counts, width=width, num_heads=num_heads)

    def _turn_and_write(
        self,
        plan: PlanBuilder,
        b: Activations,
        index: int,
        w: LayerWeights,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """q rotated by its positions; k, rotated likewise, and v in their slots of the cache."""
        arch, ropes, inputs = self._arch, self._ropes, self._inputs
        positions, slots, counts = inputs.positions, inputs.slots, inputs.counts
        shape, family, table = arch.layers[index], arch.family, self._table(index)
        is_rotated, has_own = arch.is_rotated(index), shape.kv_source is None
        of_q, of_k = (
            (b.q, arch.num_heads, ropes.query or table),
            (b.k, shape.num_kv_heads, table),
        )
        for x, num_heads, rotated_by in (of_q, of_k) if has_own else (of_q,):
            if is_rotated:
                rotate(
                    plan,
                    x,
                    positions,
                    rotated_by,
                    counts,
                    num_heads=num_heads,
                    head_dim=shape.head_dim,
                    style=family.rope_style,
                )
        if family.norms_after_rope:
            self._norm_both(plan, b, index, w)
        if has_own and self._uses_hadamard:
            size = size_for(shape.head_dim)
            for x in (b.k, b.v):
                hadamard(plan, x, counts, width=shape.kv_width, size=size)
        if has_own:
            kv_write(plan, b.k, b.v, slots, keys, values, counts)
