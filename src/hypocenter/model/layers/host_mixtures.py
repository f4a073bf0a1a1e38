"""Layers whose experts the host's CPU computes while a GPU has the rest of the model.

The whole feed-forward is the host's: its norm, the router, experts and those that are shared. Rows
of x go there, and come back with what the experts add; nothing else is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.host_work import HostWork
from hypocenter.device.memory import allocate
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.experts.host_mixture import host_mixture
from hypocenter.kernels.linear.operands import Operands
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.layers.activations import Activations
from hypocenter.model.layers.layer_ops import LayerOps, gated_operands
from hypocenter.model.layers.mixture import MixtureBuffers
from hypocenter.model.tensors.table import LayerWeights


class HostMixtures(LayerOps):
    """The feed-forwards of `layers`, whose weights lie on the host, and buffers that they share."""

    def __init__(self, arch: Architecture, layers: Sequence[LayerWeights], max_tokens: int) -> None:
        mixtures = [layer.mixture for layer in layers if layer.mixture is not None]
        dtypes = {matrix.dtype for layer in layers for matrix in layer.matrices_of_mixture}
        widest = max(arch.width, arch.dense_width)
        super().__init__(
            arch,
            allocate("host_counts", "decoder", DType.I32, (2,)),
            Operands.allocate(dtypes | {DType.F32}, max_tokens, widest, device="cpu"),
            gated_operands(arch, dtypes, max_tokens, "cpu"),
        )
        self._buffers = Activations.allocate(arch, max_tokens, device="cpu")
        self._mixture = MixtureBuffers.allocate(
            arch, mixtures, max_tokens, device="cpu", in_bf16=False
        )

    def mix(self, plan: PlanBuilder, x: Tensor, layer: LayerWeights, counts: Tensor) -> None:
        """Append x += what experts make of x, normed: f32 [num_tokens, width padded to 64]."""
        assert self._mixture is not None
        assert layer.ffn_norm is not None
        assert layer.mixture is not None
        host = PlanBuilder(plan.num_rows)
        b, mixture = self._buffers.first(plan.num_rows), self._mixture.first(plan.num_rows)
        self._begin_operands()
        self._mix(host, b, layer.ffn_norm, layer.mixture, mixture)
        host_mixture(plan, x, counts, HostWork(host.calls, b.x, self._counts, (x, counts)))
