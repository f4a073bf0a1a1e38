"""Faults that no file can carry, planted in the decoder's ops for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from hypocenter.base.tensor import Tensor
from hypocenter.device.cpu.lang import cpu_kernel, prange
from hypocenter.device.cpu.vector import get, put
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention.kv_write import kv_write
from hypocenter.kernels.rowwise import activation, activation_cpu
from hypocenter.model.layers import decoder, heads, latent_attention, layer_ops, mixture


@contextmanager
def without_rope() -> Iterator[None]:
    """Queries and keys keep no trace of their positions."""

    def unrotated(
        plan: PlanBuilder, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, slots: Tensor,
        table: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, counts: Tensor, **_: Any,
    ) -> None:  # fmt: skip
        kv_write(plan, k, v, slots, k_cache, v_cache, counts)

    def left(*_: Any, **__: Any) -> None:
        pass

    with (
        mock.patch.object(heads, "rope_write", unrotated),
        mock.patch.object(heads, "rotate", left),
        mock.patch.object(latent_attention, "rotate", left),
    ):
        yield


@contextmanager
def without_activation() -> Iterator[None]:
    """gate * up instead of silu(gate) * up; up instead of gelu(up)."""

    def left(*_: Any, **__: Any) -> None:
        pass

    with (
        mock.patch.object(activation_cpu, "gate", _ungated),
        mock.patch.object(decoder, "activate", left),
    ):
        yield


@contextmanager
def with_the_other_activation() -> Iterator[None]:
    """gelu where the family has silu, and the other way round; silu for the clamped gate.

    Where there is no gate gelu and relu2 change places. Gates of attention and of convolutions are
    left alone.
    """

    def swapped(plan: PlanBuilder, gate: Tensor, up: Tensor, kind: str, counts: Tensor) -> None:
        other = {"silu": "gelu", "gelu": "silu", "clamped": "silu"}.get(kind, kind)
        activation.gate(plan, gate, up, other, counts)

    def swapped_alone(plan: PlanBuilder, x: Tensor, kind: str, counts: Tensor) -> None:
        activation.activate(plan, x, {"relu2": "gelu", "gelu": "relu2"}[kind], counts)

    with (
        mock.patch.object(decoder, "gate", swapped),
        mock.patch.object(layer_ops, "gate", swapped),
        mock.patch.object(mixture, "gate", swapped),
        mock.patch.object(decoder, "activate", swapped_alone),
    ):
        yield


DECODER_FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no rope": without_rope,
    "no activation": without_activation,
    "silu <-> gelu": with_the_other_activation,
}


@cpu_kernel
def _ungated(gate: Any, up: Any, counts: Any, kind: int) -> None:
    width = gate.shape[1]
    for row in prange(get(counts, 0)):
        for at in range(row * width, (row + 1) * width):
            put(gate, at, get(gate, at) * get(up, at))
