"""Loads the tensors that a model's table declares, and packs the matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.device.lending import Borrower
from hypocenter.kernels.linear.linear_gate import may_join
from hypocenter.kernels.weights import packing
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors.latent_weights import by_head
from hypocenter.model.tensors.packed_weights import USUAL, PackedWeights, Packing
from hypocenter.model.tensors.rope_tables import RopeTableReader
from hypocenter.model.tensors.table import (
    LayerWeights,
    Weights,
    additions_of,
    is_of_experts,
    layer_of,
    tensor_table,
)
from hypocenter.model.tensors.tensor_reader import TensorReader
from hypocenter.model.tensors.tensor_spec import PACKED, TensorKind, TensorSpec, padded_shape
from hypocenter.settings.config import OnProgress
from hypocenter.wire.messages import KeptWeights, SharedWeight

_LARGEST_HALF = float(np.finfo(np.float16).max)


def load_weights(
    file: GGUFFile,
    architecture: Architecture,
    context_length: int,
    progress: OnProgress | None = None,
    *,
    device: str = "cpu",
    held: Packing = USUAL,
    shared: KeptWeights | None = None,
) -> Weights:
    """Pack every tensor of `file`; `progress` hears a name and the share done.

    `shared`: packed matrices of this file that another process has in the device's memory; they
    are mapped and not packed. `held`: how the CPU is to have them.

    Raises BadModelFile for a missing tensor or a wrong shape, UnsupportedModel for a tensor that
    this architecture does not use: to ignore it would be to compute something else.
    """
    num_bytes = sum(info.num_bytes for info in file.tensors.values())
    with PackedWeights(file, device, held=held, num_bytes=num_bytes) as kept:
        loader = Loader(file, architecture, progress, device, held, kept)
        if shared is not None and shared.stamps == repr(file.stamps):
            loader.borrow(shared)
        table = tensor_table(architecture, file.tensors)
        first = loader.take(table.first)
        layers = tuple(
            loader.layer(index, specs, first, on_host=index < held.num_host_layers)
            for index, specs in enumerate(table.layers)
        )
        last = loader.take(table.last)
        heads = [spec for spec in table.last if spec.kind is TensorKind.HEAD]
        head = {spec.name: loader.numbers(spec.name, spec.shape) for spec in heads}
        ropes = RopeTableReader(file, architecture, loader.values, device).tables(context_length)
        loader.refuse_unused()
        kept.finish()
    return Weights(
        token_table=first["token_table"],
        layers=layers,
        output_norm=last.get("output_norm"),
        output=last.get("output", first["token_table"]),  # some models tie the two
        makes_logits=architecture.pooling is None,
        additions=additions_of(first),
        head=head,
        ropes=ropes,
        num_bytes=num_bytes,
        in_bf16=held.in_bf16,
        output_norm_bias=last.get("output_norm_bias"),
        output_bias=last.get("output_bias"),
        not_kept=kept.problem,
    )


def load_head(
    file: GGUFFile,
    architecture: Architecture,
    of_model: Weights,
    progress: OnProgress | None = None,
    *,
    device: str,
    joins_gates: bool = True,
) -> Weights:
    """Pack the tensors of a head that drafts for the model whose weights are `of_model`; what it
    has none of its own of is the model's. Raises as `load_weights`."""
    held = Packing(in_bf16=of_model.in_bf16, joins_gates=joins_gates)
    with PackedWeights(file, device, num_bytes=0, held=held) as kept:  # not worth a file
        loader = Loader(file, architecture, progress, device, held, kept)
        table = tensor_table(architecture, file.tensors)
        first, last = loader.take(table.first), loader.take(table.last)
        layers = tuple(
            loader.layer(index, specs, first) for index, specs in enumerate(table.layers)
        )
    return replace(
        of_model,
        token_table=first.get("token_table", of_model.token_table),
        layers=layers,
        output_norm=last["output_norm"],
        output=last.get("output", of_model.output),
        adapters={
            id(shared): of_model.adapters[id(shared)]
            for shared in (of_model.token_table, of_model.output)
            if id(shared) in of_model.adapters
        },
    )


class Loader(TensorReader):
    """Packs tensors of a file, and puts them in their places."""

    def __init__(
        self,
        file: GGUFFile,
        architecture: Architecture,
        progress: OnProgress | None,
        device: str,
        held: Packing,
        kept: PackedWeights,
    ) -> None:
        super().__init__(file, architecture, progress)
        self.device, self.held, self.kept = device, held, kept
        self._shared: dict[str, SharedWeight] = {}
        self._borrower: Borrower | None = None
        #: What norms lack, by its device, value and length.
        self._constants: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}

    def borrow(self, shared: KeptWeights) -> None:
        """Take matrices from where another process has put them."""
        self._shared = shared.weights
        self._borrower = Borrower(self.device, shared.pieces)

    def layer(
        self,
        index: int,
        specs: Sequence[TensorSpec],
        first: Mapping[str, Tensor],
        *,
        on_host: bool = False,
    ) -> LayerWeights:
        """One layer, with what stands for it before all layers; its experts `on_host`, where it has
        some."""
        of_host = [spec for spec in specs if on_host and is_of_experts(spec, specs)]
        tensors = self.take([spec for spec in specs if spec not in of_host])
        tensors |= self._take_on_host(of_host)
        prefix = f"layers.{index}."
        for place, tensor in first.items():
            if place.startswith(prefix):
                tensors[place.removeprefix(prefix)] = tensor
        if "input_norm" in first:
            tensors["layer_input.projection_norm"] = first["input_norm"]
        numbers = [spec for spec in specs if spec.kind is TensorKind.NUMBER]
        scales = [float(self.values(spec.name, spec.shape)[0]) for spec in numbers]
        return layer_of(tensors, math.prod(scales))

    def take(self, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """What tensors of the file become, by place, but for numbers and what makes tables."""
        loaded: dict[str, Tensor] = {}
        to_join = self._to_join(specs)
        joined = {spec for both in to_join.values() for spec in both}
        for spec in specs:
            if spec in joined or spec.kind is TensorKind.HEAD:
                continue
            is_router = spec.kind is TensorKind.ROUTER
            tensors = self._router(spec, specs) if is_router else self._load(spec)
            loaded |= zip((part.place for part in spec.loaded), tensors, strict=True)
        return loaded | {place: self._join(both) for place, both in to_join.items()}

    def _take_on_host(self, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        """The same, packed for the CPU; another process has none of it on a GPU."""
        device, shared = self.device, self._shared
        self.device, self._shared = "cpu", {}
        try:
            return self.take(specs)
        finally:
            self.device, self._shared = device, shared

    def _load(self, spec: TensorSpec) -> Sequence[Tensor]:
        """What one tensor of the file becomes."""
        if spec.kind in PACKED:
            return self._pack(spec)
        if spec.kind is TensorKind.VECTOR:
            return self._vectors(spec)
        if spec.kind in (TensorKind.TAPS, TensorKind.ROWS):
            values = self.values(spec.name, spec.shape)
            values = values.T if spec.kind is TensorKind.TAPS else values
            padded = np.zeros(padded_shape(spec.loaded[0].shape), np.float32)
            padded[:, : values.shape[1]] = values
            return [self._place_array(spec.name, padded)]
        if spec.kind is TensorKind.BY_HEAD:
            return self._by_head(spec)
        if spec.kind is TensorKind.CONSTANT:
            return [self._constant(spec)]
        return ()

    def _pack(self, spec: TensorSpec) -> list[Tensor]:
        """Packed matrices, or a stack of them."""
        placed = [
            self._place(
                spec.name, index, rows, part.shape, is_factor=spec.kind is TensorKind.MATRIX
            )
            for index, (rows, part) in enumerate(zip(self.parts(spec), spec.loaded, strict=True))
        ]
        # Packed and mapped weights together would take twice the memory of the file.
        self.file.let_go(spec.name)
        return placed

    def _place(
        self, name: str, index: int, rows: Array, shape: tuple[int, ...], *, is_factor: bool
    ) -> Tensor:
        """Matrix `index` of a tensor, of GGUF bytes, uint8 [rows, row_bytes]; or such a stack."""
        shared, stack = self._shared.get(f"{name} {index}"), shape if len(shape) > 2 else None
        if shared is not None and self._borrower is not None:
            return packing.borrow(name, shared, self._borrower, shape=stack)
        dtype = self.file.tensors[name].dtype
        self._refuse_reserved(name, rows, dtype)
        packed = packing.pack(
            rows,
            dtype,
            shape[-1],
            device=self.device,
            in_bf16=self.held.in_bf16 and is_factor,
            kept=partial(self.kept.find, f"{name} {index}"),
            read=self.file.let_go_of,
            factors=self._factors(name),
        )
        self.kept.keep(f"{name} {index}", packed.parts)
        return packing.place(name, "model", packed, device=self.device, shape=stack)

    def _to_join(self, specs: Sequence[TensorSpec]) -> dict[str, tuple[TensorSpec, ...]]:
        """What makes the one weight of each feed-forward's gate and up, by its place."""
        groups: dict[str, dict[str, TensorSpec]] = {}
        for spec in specs:
            for part in spec.loaded:
                group, _, field = part.place.rpartition(".")
                groups.setdefault(group, {})[field] = spec
        joined = {}
        for group, parts in groups.items():
            if (
                not {"gate", "up", "down"} <= parts.keys()
                or {"gate_bias", "up_bias"} & parts.keys()
            ):
                continue
            both = tuple(dict.fromkeys((parts["gate"], parts["up"])))
            if self._may_join([spec.name for spec in (*both, parts["down"])]):
                joined[f"{group}.gate_up"] = both
        return joined

    def _may_join(self, names: Sequence[str]) -> bool:
        known = self.file.tensors  # what is missing is told of where it is read
        is_there = all(name in known for name in names)
        if self.device != "cpu" or not self.held.joins_gates or not is_there:
            return False
        return may_join([known[name].dtype for name in names])

    def _join(self, specs: Sequence[TensorSpec]) -> Tensor:
        """A weight that holds gate and up by turns."""
        names, (*lead, _, width) = [spec.name for spec in specs], specs[0].shape
        dtype, both = self.file.tensors[names[0]].dtype, " + ".join(names)
        raws = [raw for spec in specs for raw in self.parts(spec)]
        for raw in raws:
            self._refuse_reserved(both, raw, dtype)
        packed = packing.pack_by_turns(
            raws,
            dtype,
            width,
            kept=partial(self.kept.find, both),
            read=self.file.let_go_of,
            factors=[self._factors(spec.name) for spec in specs for _ in spec.loaded],
        )
        self.kept.keep(both, packed.parts)
        for name in names:
            self.file.let_go(name)
        shape = (*lead, packed.num_rows // lead[0], width) if lead else None
        return packing.place(both, "model", packed, shape=shape)

    def _router(self, router: TensorSpec, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """Its rows, and behind them that of the shared expert's gate, as F32 whatever they are."""
        if not router.loaded:
            return []
        rows = [self.numbers(x.name, x.shape) for x in specs if x.kind is TensorKind.ROUTER]
        values = np.ascontiguousarray(np.concatenate(rows), np.float32)
        packed = packing.pack(
            values.view(np.uint8), DType.F32, router.shape[-1], device=self.device
        )
        return [packing.place(router.name, "model", packed, device=self.device)]

    def _vectors(self, spec: TensorSpec) -> list[Tensor]:
        """Vectors of f32, each padded with zeros to a multiple of 64."""
        values = self.values(spec.name, spec.shape) / np.float32(math.sqrt(spec.over_root_of))
        ends = np.cumsum([math.prod(part.shape) for part in spec.loaded])[:-1]
        parts = zip(np.split(values.reshape(-1), ends), spec.loaded, strict=True)
        return [self._vector(spec.name, numbers.reshape(part.shape)) for numbers, part in parts]

    def _vector(self, name: str, values: np.ndarray[Any, Any]) -> Tensor:
        padded = np.zeros(padded_shape(values.shape), np.float32)
        padded[..., : values.shape[-1]] = values
        return self._place_array(name, padded.reshape(-1))

    def _constant(self, spec: TensorSpec) -> Tensor:
        """One for all norms that lack the same."""
        key = self.device, spec.value, spec.shape
        if (found := self._constants.get(key)) is None:
            found = self._vector(spec.name, np.full(spec.shape, spec.value, np.float32))
            self._constants[key] = found
        return found

    def _by_head(self, spec: TensorSpec) -> list[Tensor]:
        """Small matrices for each head as f16 or f32: f32 where f16 has no room for them."""
        arch, dtype = self.arch, self.file.tensors[spec.name].dtype
        assert arch.latent is not None
        numbers = self.numbers(spec.name, spec.shape)
        matrices = []
        for part, values in zip(
            spec.loaded, by_head(arch.latent, arch.num_heads, numbers), strict=True
        ):
            is_half = dtype not in (DType.F32, DType.BF16)
            is_half = is_half and float(np.abs(values).max()) <= _LARGEST_HALF
            padded = np.zeros(padded_shape(part.shape), np.float16 if is_half else np.float32)
            padded[..., : part.shape[-1]] = values
            matrices.append(
                self._place_array(f"{spec.name} ({part.place.rpartition('.')[2]})", padded)
            )
        return matrices

    def _place_array(self, name: str, values: np.ndarray[Any, Any]) -> Tensor:
        """Numbers of f32 or f16 as they are."""
        is_half = values.dtype == np.float16
        kind = DType.F16 if is_half else DType.F32
        tensor = memory.allocate(name, "model", kind, values.shape, device=self.device)
        copies.to_device(tensor, values.view(np.uint16) if is_half else values)
        return tensor
