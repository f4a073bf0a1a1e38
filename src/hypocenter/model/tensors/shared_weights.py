"""Packs a model's matrices into memory of a GPU that other processes map."""

from __future__ import annotations

import time
from typing import Any

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import Tensor
from hypocenter.device.lending import Lender
from hypocenter.kernels.weights import packing
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors.packed_weights import PackedWeights
from hypocenter.model.tensors.tensor_check import NO_TENSOR, Looker
from hypocenter.settings.config import OnProgress
from hypocenter.wire.messages import KeptWeights, SharedWeight


def lend_weights(
    file: GGUFFile,
    architecture: Architecture,
    progress: OnProgress | None = None,
    *,
    device: str,
) -> KeptWeights:
    """Pack every matrix of `file` into memory of a GPU that other processes may map.

    Routers of experts, norms and the like are small, and each process has its own. Launches
    nothing. Raises what `load_weights` raises, and NotShareable.
    """
    began = time.monotonic()
    with PackedWeights(file, device, in_bf16=False, num_bytes=0) as kept:
        lender = _LendingLoader(file, architecture, progress, device, False, kept)
        lender.take_all()
    pieces = tuple(lender.to.pieces)
    return KeptWeights(repr(file.stamps), pieces, lender.lent, time.monotonic() - began)


class _LendingLoader(Looker):
    """Packs matrices, and looks at the rest."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.to = Lender(self.device)
        self.lent: dict[str, SharedWeight] = {}

    def _split(
        self,
        name: str,
        row_counts: tuple[int, ...],
        num_columns: int,
        *,
        is_factor: bool = True,
        num_experts: int = 0,
    ) -> tuple[Tensor, ...]:
        all_rows = self._rows(name, row_counts, num_columns, num_experts)
        for index, rows in enumerate(all_rows):
            self._lend(name, index, rows, num_columns)
        self.file.let_go(name)
        return (NO_TENSOR,) * len(row_counts)

    def by_turns(
        self, name: str, row_counts: tuple[int, ...], num_turns: int
    ) -> tuple[Tensor, Tensor]:
        for index, rows in enumerate(self._turns(name, row_counts, num_turns)):
            self._lend(name, index, rows, self.facts.width)
        self.file.let_go(name)
        return NO_TENSOR, NO_TENSOR

    def _columns(
        self, name: str, num_rows: int, column_counts: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        for index, rows in enumerate(self._split_columns(name, num_rows, column_counts)):
            self._lend(name, index, rows, column_counts[index])
        self.file.let_go(name)
        return (NO_TENSOR,) * len(column_counts)

    def _lend(self, name: str, index: int, rows: Array, num_columns: int) -> None:
        """Part `index` of a tensor, as GGUF bytes."""
        dtype = self.file.tensors[name].dtype
        self._refuse_reserved(name, rows, dtype)
        packed = packing.pack(
            rows,
            dtype,
            num_columns,
            device=self.device,
            on_host=True,
            factors=self._factors(name),
        )
        self.lent[f"{name} {index}"] = packing.lend(name, packed, self.to)
