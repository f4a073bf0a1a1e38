"""Packs a model's matrices into memory of a GPU that other processes map."""

from __future__ import annotations

import time

from hypocenter.device import devices
from hypocenter.device.lending import Lender
from hypocenter.kernels.weights import packing
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors.table import tensor_table
from hypocenter.model.tensors.tensor_reader import TensorReader
from hypocenter.model.tensors.tensor_spec import PACKED, TensorSpec
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

    The GPU packs them. Routers of experts, norms and the like are small, and each process has its
    own. Raises what `load_weights` raises, and NotShareable.
    """
    began = time.monotonic()
    lender = _WeightLender(file, architecture, progress, device)
    for spec in tensor_table(architecture, file.tensors):
        if spec.kind in PACKED:
            lender.lend(spec)
        else:
            lender.look_for(spec)
    lender.refuse_unused()
    # What packing took besides is for those who run the model.
    devices.call_device(device, "release_cached")
    pieces = tuple(lender.to.pieces)
    return KeptWeights(repr(file.stamps), pieces, lender.lent, time.monotonic() - began)


class _WeightLender(TensorReader):
    """Packs matrices where other processes may map them."""

    def __init__(
        self,
        file: GGUFFile,
        architecture: Architecture,
        progress: OnProgress | None,
        device: str,
    ) -> None:
        super().__init__(file, architecture, progress)
        self.device, self.to = device, Lender(device)
        self.lent: dict[str, SharedWeight] = {}

    def lend(self, spec: TensorSpec) -> None:
        """Each matrix that a tensor is loaded as, as `Loader` names them."""
        for index, (rows, part) in enumerate(zip(self.parts(spec), spec.loaded, strict=True)):
            dtype = self.file.tensors[spec.name].dtype
            self._refuse_reserved(spec.name, rows, dtype)
            packed = packing.pack(
                rows,
                dtype,
                part.shape[-1],
                device=self.device,
                factors=self._factors(spec.name),
            )
            self.lent[f"{spec.name} {index}"] = packing.lend(spec.name, packed, self.to)
        self.file.let_go(spec.name)
