"""Packs a model's matrices into memory of a GPU that other processes map."""

from __future__ import annotations

from hypocenter.base.errors import StaleLayout
from hypocenter.device import devices
from hypocenter.device.lending import Lender
from hypocenter.kernels.weights import packing
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors.table import tensor_table
from hypocenter.model.tensors.tensor_reader import TensorReader
from hypocenter.model.tensors.tensor_spec import PACKED, TensorSpec
from hypocenter.model.tensors.weight_layout import (
    WeightLayout,
    forget_layout,
    read_layout,
    write_layout,
)
from hypocenter.settings.config import OnProgress
from hypocenter.wire.messages import KeptWeights, SharedWeight


class WeightLender(TensorReader):
    """Packs every matrix of `file` into memory of a GPU that other processes may map.

    The GPU packs them. Routers of experts, norms and the like are small, and each process has its
    own. `part_name` tells apart the parts that ranks have of one file.
    """

    def __init__(
        self, file: GGUFFile, architecture: Architecture, device: str, part_name: str = ""
    ) -> None:
        super().__init__(file, architecture, None)
        self._device, self._to = device, Lender(device)
        self._lent: dict[str, SharedWeight] = {}
        self._name = f"{file.stamps!r} {part_name}"
        self._planned: WeightLayout | None = None

    def plan(self) -> KeptWeights | None:
        """The weights in memory that is still empty, where it is known how they will lie there.

        Raises OutOfMemory and NotShareable.
        """
        if (layout := read_layout(self._name)) is None:
            return None
        self._planned = layout
        pieces = self._to.take_ahead(layout.piece_bytes)
        return KeptWeights(repr(self.file.stamps), pieces, layout.weights)

    def fill(self, progress: OnProgress | None = None) -> KeptWeights:
        """Pack all of them. Raises what `load_weights` raises, NotShareable, and StaleLayout where
        one does not come to lie where the plan has it."""
        self.progress = progress
        for spec in tensor_table(self.arch, self.file.tensors):
            if spec.kind in PACKED:
                self._lend(spec)
            else:
                self.look_for(spec)
        self.refuse_unused()
        # What packing took besides is for those who run the model.
        devices.call_device(self._device, "release_cached")
        if self._planned is None:
            sizes = tuple(piece.num_bytes for piece in self._to.pieces)
            write_layout(self._name, WeightLayout(sizes, self._lent))
        else:
            devices.synchronise(self._device)  # others are told that all is there
        return KeptWeights(repr(self.file.stamps), tuple(self._to.pieces), self._lent)

    def _lend(self, spec: TensorSpec) -> None:
        """Each matrix that a tensor is loaded as, as `Loader` names them."""
        for index, (rows, part) in enumerate(zip(self.parts(spec), spec.loaded, strict=True)):
            dtype = self.file.tensors[spec.name].dtype
            self._refuse_reserved(spec.name, rows, dtype)
            packed = packing.pack(
                rows,
                dtype,
                part.shape[-1],
                device=self._device,
                factors=self._factors(spec.name),
            )
            name = f"{spec.name} {index}"
            lent = self._lent[name] = packing.lend(spec.name, packed, self._to)
            if self._planned is not None and self._planned.weights.get(name) != lent:
                forget_layout(self._name)
                raise StaleLayout(spec.name)
        self.file.let_go(spec.name)
