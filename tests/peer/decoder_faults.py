"""Faults that no file can carry, planted in the decoder's ops for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from hypocenter.base.tensor import Tensor
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention.kv_write import kv_write
from hypocenter.kernels.rowwise import activation
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
def _with_gates(others: dict[str, str]) -> Iterator[None]:
    """Other kinds of gates; those of attention and of convolutions are left alone."""

    def other(plan: PlanBuilder, gate: Tensor, up: Tensor, kind: str, counts: Tensor) -> None:
        activation.gate(plan, gate, up, others.get(kind, kind), counts)

    with (
        mock.patch.object(decoder, "gate", other),
        mock.patch.object(layer_ops, "gate", other),
        mock.patch.object(mixture, "gate", other),
    ):
        yield


@contextmanager
def without_activation() -> Iterator[None]:
    """gate * up instead of silu(gate) * up; up instead of gelu(up)."""

    def left(*_: Any, **__: Any) -> None:
        pass

    with (
        _with_gates(dict.fromkeys(("silu", "gelu", "clamped"), "plain")),
        mock.patch.object(layer_ops, "activate", left),
    ):
        yield


@contextmanager
def with_the_other_activation() -> Iterator[None]:
    """gelu where the family has silu, and the other way round; silu for the clamped gate.

    Where there is no gate gelu and relu2 change places.
    """

    def swapped_alone(plan: PlanBuilder, x: Tensor, kind: str, counts: Tensor) -> None:
        activation.activate(plan, x, {"relu2": "gelu", "gelu": "relu2"}[kind], counts)

    with (
        _with_gates({"silu": "gelu", "gelu": "silu", "clamped": "silu"}),
        mock.patch.object(layer_ops, "activate", swapped_alone),
    ):
        yield


DECODER_FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no rope": without_rope,
    "no activation": without_activation,
    "silu <-> gelu": with_the_other_activation,
}
