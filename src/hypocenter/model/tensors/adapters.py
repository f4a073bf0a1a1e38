"""Adapters on a device: for each matrix of a model, what all of them have beside it.

The model's own matrices are neither copied nor changed: products with a pair are added to theirs
(`kernels/linear/adapter.py`), for each row of a step by the adapters of its request.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import BadSetting
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory
from hypocenter.kernels.linear.adapter_sizes import RANKS
from hypocenter.kernels.weights import packing
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors.adapter_file import (
    AdapterFile,
    LowRankPair,
    is_token_table,
    load_adapter,
)
from hypocenter.model.tensors.mixer_weights import MIXERS
from hypocenter.model.tensors.part_of_file import cut_axis, runs_of
from hypocenter.model.tensors.table import Adapted, Weights, tensor_table
from hypocenter.model.tensors.tensor_reader import matrix_parts
from hypocenter.model.tensors.tensor_spec import TensorSpec
from hypocenter.settings.adapters import read_choice

#: Tensors of a layer, or of none.
_Group = tuple[int | None, Sequence[TensorSpec]]


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of an engine, in the order in which they were given."""

    files: tuple[AdapterFile, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self.files)

    @property
    def targets(self) -> frozenset[str]:
        """Names of the tensors that one of them stands beside."""
        return frozenset(name for file in self.files for name in file.pairs)

    @property
    def reads_feed_forwards(self) -> bool:
        """Whether one stands beside a feed-forward, whose gate and up are then held apart."""
        return any(".ffn_" in name for name in self.targets)

    def without_numbers(self) -> AdapterSet:
        """What is asked of them once a device has their numbers."""
        return AdapterSet(tuple(replace(file, pairs={}) for file in self.files))

    def scales(self, asked: Sequence[tuple[str, float]] | None) -> tuple[float, ...]:
        """What each counts for a request that asks so; None: as they were given. Empty where none
        counts anything. Raises BadSetting for one that is not there."""
        if asked is None:
            found = [file.scale for file in self.files]
        else:
            found = [0.0] * len(self.files)
            for name, scale in asked:
                if name not in self.names:
                    known = ", ".join(self.names)
                    raise BadSetting("lora", name, f"must be one of the adapters: {known}")
                found[self.names.index(name)] = float(np.float32(scale))
        return tuple(found) if any(found) else ()

    def digest(self, scales: Sequence[float]) -> bytes:
        """What stands for adapters with these scales; empty for none."""
        if not any(scales):
            return b""
        content = hashlib.blake2b(digest_size=32)
        for file, scale in zip(self.files, scales, strict=True):
            if scale:
                content.update(file.digest + struct.pack("<f", scale))
        return content.digest()


def num_bytes_of(adapters: AdapterSet | None) -> int:
    """About what they take on a device."""
    files = adapters.files if adapters is not None else ()
    pairs = [pair for file in files for pair in file.pairs.values()]
    return sum(pair.down.nbytes + pair.up.nbytes for pair in pairs)


def open_adapters(texts: Sequence[str], base: GGUFFile, arch: Architecture) -> AdapterSet | None:
    """The adapters that a configuration names; None for none. Raises as `load_adapter`."""
    choices = [read_choice(text) for text in texts]
    files = [load_adapter(choice.name, choice.path, choice.scale, base, arch) for choice in choices]
    return AdapterSet(tuple(files)) if files else None


def part_of_adapters(
    adapters: AdapterSet | None,
    whole: tuple[GGUFFile, Architecture],
    own: tuple[GGUFFile, Architecture],
) -> AdapterSet | None:
    """What one part of a model has of its adapters: columns of A where it has columns of a matrix,
    rows of B where it has rows. They are named and stand for the same as the whole ones do.

    `whole` and `own` are the model and the part.
    """
    if adapters is None or own[1].part.num_parts == 1:
        return adapters
    specs, parts = (
        {spec.name: spec for spec in tensor_table(arch, file.tensors)}
        for file, arch in (whole, own)
    )

    def cut(name: str, pair: LowRankPair) -> LowRankPair:
        axis = cut_axis(specs[name], parts[name])
        if axis is None:
            return pair
        lengths = specs[name].segments_along(axis), parts[name].segments_along(axis)
        runs = runs_of(list(zip(*lengths, strict=True)), own[1].part)
        of_axis = np.concatenate([np.arange(begin, end) for begin, end in runs])
        if axis == -1:
            return replace(pair, down=np.ascontiguousarray(pair.down.take(of_axis, axis)))
        return replace(pair, up=pair.up.take(of_axis, axis))

    files = (
        replace(file, pairs={name: cut(name, pair) for name, pair in file.pairs.items()})
        for file in adapters.files
    )
    return AdapterSet(tuple(files))


def with_adapters(
    weights: Weights, adapters: AdapterSet | None, base: GGUFFile, arch: Architecture, device: str
) -> Weights:
    """The weights with what stands beside each matrix of them, and what they have already."""
    if adapters is None:
        return weights
    table = tensor_table(arch, base.tensors)
    placed: dict[int, Adapted] = dict(weights.adapters)
    ends: list[_Group] = [(None, table.first), (None, table.last)]
    for layer, specs in (*ends, *enumerate(table.layers)):
        for spec in specs:
            if spec.name not in adapters.targets:
                continue
            pairs = [file.pairs.get(spec.name) for file in adapters.files]
            if is_token_table(spec):
                placed[id(weights.token_table)] = _place_table(spec.name, pairs, device)
                continue
            parts = [None if pair is None else _parts_of(spec, pair) for pair in pairs]
            for number, loaded in enumerate(spec.loaded):
                own = [None if part is None else part[number] for part in parts]
                weight = _weight_at(weights, layer, loaded.place)
                placed[id(weight)] = _place(spec.name, own, device)
    return replace(weights, adapters=placed)


def _parts_of(spec: TensorSpec, pair: LowRankPair) -> list[LowRankPair]:
    """What stands beside each weight that a matrix, or a stack of them, is loaded as: rows of B, or
    columns of A, are shared out as those of the matrix are."""
    if spec.is_cut_by_columns:
        ends = np.cumsum(spec.segments_along(-1))[:-1]
        return [replace(pair, down=down) for down in np.split(pair.down, ends, axis=-1)]
    if pair.up.ndim == 2:
        ups = matrix_parts(spec, pair.up)
    else:
        ups = np.split(pair.up, np.cumsum(spec.segments_along(-2))[:-1], axis=1)
    return [replace(pair, up=up) for up in ups]


def _weight_at(weights: Weights, layer: int | None, place: str) -> Tensor:
    """The tensor of a place of a layer, or of the model."""
    first, *rest = place.split(".")
    if layer is None and first == "layers":
        layer, (first, *rest) = int(rest[0]), rest[1:]
    holder = weights if layer is None else weights.layers[layer]
    names = ["mixer" if first in MIXERS else first, *rest]
    found = reduce(getattr, names, holder)
    assert isinstance(found, Tensor), (layer, place)
    return found


def _place(name: str, pairs: Sequence[LowRankPair | None], device: str) -> Adapted:
    downs: list[Array] = []
    outs: list[Array] = []
    owners: list[int] = []
    factors: list[float] = []
    is_half = all(pair.is_half for pair in pairs if pair is not None)
    for index, pair in enumerate(pairs):
        if pair is None:
            continue
        num_tiles = -(-pair.down.shape[-2] // RANKS)
        downs.append(_tiles_of(pair.down, num_tiles))
        outs.append(_tiles_of(pair.up.swapaxes(-1, -2), num_tiles))
        owners += [index] * num_tiles
        factors += [pair.factor] * num_tiles

    def put(label: str, values: Array) -> Tensor:
        is_f16 = values.dtype == np.float32 and values.ndim > 1 and is_half
        values = values.astype(np.float16).view(np.uint16) if is_f16 else values
        kinds = {"float32": DType.F32, "uint16": DType.F16, "int32": DType.I32}
        kind = kinds[values.dtype.name]
        tensor = memory.allocate(f"{name} {label}", "model", kind, values.shape, device=device)
        copies.to_device(tensor, values)
        return tensor

    return Adapted(
        down=put("lora_a", np.concatenate(downs, axis=-2)),
        up=put("lora_b", np.concatenate(outs, axis=-2)),
        owners=put("lora owners", np.array(owners, np.int32)),
        factors=put("lora factors", np.array(factors, np.float32)),
        num_columns=next(pair.down.shape[-1] for pair in pairs if pair is not None),
    )


def _place_table(name: str, pairs: Sequence[LowRankPair | None], device: str) -> Adapted:
    """What stands beside the token table: rows of A that are looked up, and B.

    What is looked up goes through `adapter_down` with ones on a diagonal, which gives each row what
    its own adapters count and changes no number else.
    """
    ranks = [0 if pair is None else RANKS * -(-pair.down.shape[1] // RANKS) for pair in pairs]
    num_rows = next(len(pair.down) for pair in pairs if pair is not None)
    rows, at = np.zeros((num_rows, padded_rows(sum(ranks))), np.float32), 0
    ones: list[LowRankPair | None] = []
    for pair, num_ranks in zip(pairs, ranks, strict=True):
        if pair is not None:
            rows[:, at : at + pair.down.shape[1]] = pair.down
            diagonal = np.eye(num_ranks, sum(ranks), at, np.float32)
            wide = np.pad(pair.up, ((0, 0), (0, num_ranks - pair.up.shape[1])))
            ones.append(replace(pair, down=diagonal, up=wide, is_half=pair.is_half))
            at += num_ranks
        else:
            ones.append(None)
    beside = _place(name, ones, device)
    packed = packing.pack(rows.view(np.uint8), DType.F32, rows.shape[1], device=device)
    table = packing.place(f"{name} lora_a", "model", packed, device=device)
    return replace(beside, table=table)


def _tiles_of(rows: Array, num_tiles: int) -> Array:
    """Rows of ranks, with zeros to whole tiles of them and to 64 columns."""
    *lead, num_ranks, num_columns = rows.shape
    wide = np.zeros((*lead, num_tiles * RANKS, padded_rows(num_columns)), np.float32)
    wide[..., :num_ranks, :num_columns] = rows
    return wide
