"""Looks for every tensor that a model needs, by name and shape, and reads none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from hypocenter.base.tensor import Tensor
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.experts import Experts
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors.packed_weights import PackedWeights
from hypocenter.model.tensors.weight_tensors import BesideDense
from hypocenter.model.tensors.weights import Loader


def check_tensors(file: GGUFFile, architecture: Architecture) -> None:
    """Look for every tensor that `load_weights` would take, and read none.

    Raises what that would raise for one that is missing, too many, or of a wrong shape.
    """
    with PackedWeights(file, "none", in_bf16=False, num_bytes=0) as kept:
        Looker(file, architecture, None, "cpu", False, kept).take_all()


class Looker(Loader):
    """Goes the loader's way and takes nothing but names."""

    def take_all(self) -> None:
        """Every tensor that `load_weights` takes; raises UnsupportedModel for one too many."""
        table = self.token_table()
        for index in range(self.facts.num_layers):
            self.layer(index)
        self.output(table)
        for name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
            self.taken.add(name)
        self.refuse_unused()

    def vector(self, name: str, length: int) -> Tensor:
        self._expect(name, (length,))
        return NO_TENSOR

    def _vectors(self, name: str, num_vectors: int, length: int) -> Tensor:
        self._expect(name, (num_vectors, length))
        return NO_TENSOR

    def _pad(self, name: str, values: np.ndarray[Any, Any]) -> Tensor:
        return NO_TENSOR

    def _may_join(self, names: Sequence[str]) -> bool:
        return False

    def _beside(self, prefix: str) -> BesideDense:
        width = self.facts.width
        for name in ("ffn_gate_inp.scale", "pre_ffw_norm_2.weight", "post_ffw_norm_1.weight"):
            self._expect(f"{prefix}{name}", (width,))
        self._expect(f"{prefix}post_ffw_norm_2.weight", (width,))
        return BesideDense(NO_TENSOR, NO_TENSOR, NO_TENSOR, NO_TENSOR)

    def numbers(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        self._expect(name, shape)
        return np.broadcast_to(np.float32(0), shape)

    def by_head(self, name: str, of: str, values: np.ndarray[Any, Any]) -> Tensor:
        return NO_TENSOR

    def taps(self, name: str, num_channels: int, num_taps: int) -> Tensor:
        self._expect(name, (num_channels, num_taps))
        return NO_TENSOR

    def _router(self, prefix: str, experts: Experts) -> Tensor:
        width = self.facts.width
        self._expect(f"{prefix}ffn_gate_inp.weight", (experts.choice.num_experts, width))
        if experts.choice.has_gate:
            self._expect(f"{prefix}ffn_gate_inp_shexp.weight", (width,))
        return NO_TENSOR

    def _qkv_biases(self, prefix: str, rows: tuple[int, int, int]) -> tuple[Tensor | None, ...]:
        fused = f"{prefix}attn_qkv.bias"
        if fused in self.file.tensors:
            self._expect(fused, (sum(rows),))
            return (None,) * len(rows)
        return super()._qkv_biases(prefix, rows)

    def _columns(
        self, name: str, num_rows: int, column_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        self._expect(name, (num_rows, sum(column_counts)))
        return (NO_TENSOR,) * len(column_counts)

    def by_turns(
        self, name: str, row_counts: tuple[int, ...], num_turns: int
    ) -> tuple[Tensor, Tensor]:
        self._expect(name, (sum(row_counts), self.facts.width))
        return NO_TENSOR, NO_TENSOR

    def values(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        self._expect(name, shape)
        return np.ones(shape, np.float32)

    def _split(
        self,
        name: str,
        row_counts: tuple[int, ...],
        num_columns: int,
        *,
        is_factor: bool = True,
        num_experts: int = 0,
    ) -> tuple[Tensor, ...]:
        lead = (num_experts,) if num_experts else ()
        self._expect(name, (*lead, sum(row_counts), num_columns))
        return (NO_TENSOR,) * len(row_counts)


#: What stands where a tensor would.
NO_TENSOR = cast(Tensor, None)
