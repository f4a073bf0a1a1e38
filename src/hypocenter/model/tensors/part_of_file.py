"""The tensors of one part of a model: which rows and columns of the file are its own.

Nothing here knows tensors by name: what a part has of one is where its shape in the table of the
part differs from that in the table of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import BadModelFile
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.part import Part
from hypocenter.model.facts.split import cannot_split, part_of
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.values import TensorInfo, without_leading_ones
from hypocenter.model.tensors.table import tensor_table
from hypocenter.model.tensors.tensor_spec import TensorKind, TensorSpec


@dataclass(frozen=True, slots=True)
class _Cut:
    """A tensor as [num_leading, units, unit_bytes], of whose units a part has some.

    `runs` are where those begin and end. Without any the part holds zeros.
    """

    source: str
    num_leading: int
    unit_bytes: int
    runs: tuple[tuple[int, int], ...]


class PartOfFile(GGUFFile):
    """An open model of which only the tensors of one part are seen, cut to size.

    `arch` describes the whole model, and `part_of` has had no objection.
    """

    def __init__(self, whole: GGUFFile, arch: Architecture, part: Part) -> None:
        """Raises BadSetting where a part would end within a block of quantised weights,
        BadModelFile for a tensor of a wrong shape."""
        super().__init__(whole._open())
        self._whole, self._arch, self._part = whole, arch, part
        self._cuts: dict[str, _Cut] = {}
        infos = dict(whole.tensors)
        if arch.vocab_size % part.num_parts == 0 and "output.weight" not in infos:
            infos["output.weight"] = infos["token_embd.weight"]
        # Whatever is too much or missing is refused when the part is loaded.
        tables = tensor_table(arch, infos), tensor_table(part_of(arch, part), infos)
        for of_whole, of_part in zip(*tables, strict=True):
            if (info := infos.get(of_whole.name)) is not None:
                infos[of_whole.name] = self._cut(info, of_whole, of_part)
        self._tensors = MappingProxyType(infos)

    def raw(self, name: str) -> Array:
        """The bytes of the part's own rows or columns of a tensor: uint8 [num_bytes]."""
        cut = self._cuts.get(name)
        if cut is None:
            return self._whole.raw(name)
        if not cut.runs:
            return np.zeros(self._tensors[name].num_bytes, np.uint8)
        units = self._whole.raw(cut.source).reshape(cut.num_leading, -1, cut.unit_bytes)
        runs = [units[:, begin:end] for begin, end in cut.runs]
        return np.concatenate(runs, axis=1).reshape(-1) if len(runs) > 1 else _flat(runs[0])

    def let_go(self, name: str) -> None:
        cut = self._cuts.get(name)
        self._whole.let_go(name if cut is None else cut.source)

    def _cut(self, info: TensorInfo, whole: TensorSpec, part: TensorSpec) -> TensorInfo:
        """What the part has of a tensor of the file."""
        if without_leading_ones(info.shape) != without_leading_ones(whole.shape):
            limit = f"the metadata say {whole.shape}"
            raise BadModelFile(self.path, f"{info.name} shape", info.shape, limit)
        if whole.is_added_once and self._part.rank:
            self._cuts[whole.name] = _Cut(info.name, 1, 1, ())
            return info
        axis = cut_axis(whole, part)
        if axis is None:
            return info
        segments = list(zip(whole.segments_along(axis), part.segments_along(axis), strict=True))
        unit_bytes = info.dtype.block_bytes
        if axis < -1:  # whole rows
            unit_bytes = info.dtype.num_bytes(math.prod(info.shape[axis + 1 :]))
        elif whole.kind is TensorKind.MATRIX:  # blocks of a row stay whole
            num_blocks = self._blocks(info)
            segments = [(num_blocks, num_blocks // self._part.num_parts)]
        return self._keep(whole.name, info, len(info.shape) + axis, unit_bytes, segments)

    def _blocks(self, info: TensorInfo) -> int:
        """Blocks of a row, of which each part has some."""
        num_columns, per_block = info.shape[-1], info.dtype.block_elements
        num_parts = self._part.num_parts
        if num_columns % (per_block * num_parts):
            problem = f"{num_columns} columns of {info.name} are no {num_parts} parts of whole "
            raise cannot_split(self._arch, num_parts, f"{problem}blocks of {per_block}")
        return num_columns // per_block

    def _keep(
        self,
        name: str,
        info: TensorInfo,
        axis: int,
        unit_bytes: int,
        segments: Sequence[tuple[int, int]],
    ) -> TensorInfo:
        """`segments`: the units of each one in the whole, and in the part."""
        num_leading = math.prod(info.shape[:axis])
        runs = runs_of(segments, self._part)
        self._cuts[name] = _Cut(info.name, num_leading, unit_bytes, runs)
        shape = list(info.shape)
        num_all, num_own = (sum(counts) for counts in zip(*segments, strict=True))
        shape[axis] = shape[axis] * num_own // num_all
        num_bytes = info.num_bytes * num_own // num_all
        return replace(info, name=name, shape=tuple(shape), num_bytes=num_bytes)


def cut_axis(whole: TensorSpec, part: TensorSpec) -> int | None:
    """The axis of which a part has some, counted from the last (-1); None: it has the whole.

    Axes of 1 may stand before those of the file, or be missing there.
    """
    num_axes = len(whole.shape)
    found = (i for i in range(num_axes) if whole.shape[i] != part.shape[i])
    return next((axis - num_axes for axis in found), None)


def runs_of(segments: Sequence[tuple[int, int]], part: Part) -> tuple[tuple[int, int], ...]:
    """Where the units of a part begin and end. `segments`: those of each in the whole, and in a
    part."""
    runs, start = [], 0
    for length, size in segments:
        num_copies = size * part.num_parts // length  # of each unit: heads of keys may be few
        begin = start + part.rank // num_copies * size
        runs.append((begin, begin + size))
        start += length
    return tuple(runs)


def _flat(units: Array) -> Array:
    return np.ascontiguousarray(units).reshape(-1)
