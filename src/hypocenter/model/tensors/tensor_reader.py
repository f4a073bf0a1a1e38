"""Reads tensors of a file as GGUF bytes or as floats, and remembers which; packs none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import MISSING, BadModelFile, UnsupportedModel, Words
from hypocenter.base.tensor import DType
from hypocenter.kernels.weights import packing
from hypocenter.kernels.weights.block_types import as_ggml_reads, dequantise, find_reserved
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.gguf.values import without_leading_ones
from hypocenter.model.tensors.table import tensor_table
from hypocenter.model.tensors.tensor_spec import TensorKind, TensorSpec
from hypocenter.settings.config import OnProgress


def check_tensors(file: GGUFFile, architecture: Architecture) -> None:
    """Look for every tensor that `load_weights` would take, and read none.

    Raises what that would raise for one that is missing, too many, or of a wrong shape.
    """
    reader = TensorReader(file, architecture, None)
    for spec in tensor_table(architecture, file.tensors):
        reader.look_for(spec)
    reader.refuse_unused()


class TensorReader:
    """Takes tensors out of a file by name; each must have the shape that the metadata imply."""

    def __init__(
        self, file: GGUFFile, architecture: Architecture, progress: OnProgress | None
    ) -> None:
        self.file, self.arch, self.progress = file, architecture, progress
        self.taken: set[str] = set()

    def refuse_unused(self) -> None:
        for name in self.file.tensors:
            if name not in self.taken and not self.arch.passes_over(name):
                raise UnsupportedModel(
                    self.file.path,
                    "tensor",
                    name,
                    f"{self.arch.name} models of {self.arch.num_layers} layers have no such tensor",
                )

    def look_for(self, spec: TensorSpec) -> None:
        """Take a tensor without reading it. Raises BadModelFile where it is missing or has another
        shape."""
        if spec.kind is not TensorKind.CONSTANT:
            self._expect(spec.name, spec.shape)

    def parts(self, spec: TensorSpec) -> Iterable[Array]:
        """GGUF bytes of what is packed, uint8 [rows, row_bytes] for each that it is loaded as.

        Those of a stack are padded to 64 rows each.
        """
        if spec.is_cut_by_columns:
            return self._columns(spec)
        return self._rows(spec)

    def _columns(self, spec: TensorSpec) -> Iterator[Array]:
        dtype = self._expect(spec.name, spec.shape)
        counts = [part.shape[-1] for part in spec.loaded]
        for count in counts:
            if count % dtype.block_elements:
                limit = f"blocks of {dtype.block_elements} columns must not span two parts"
                field = f"{spec.name}: columns of a part"
                raise UnsupportedModel(self.file.path, field, count, limit)
        raw = self._raw(spec.name, dtype).reshape(spec.shape[0], -1)
        ends = np.cumsum([dtype.num_bytes(count) for count in counts])[:-1]
        yield from map(np.ascontiguousarray, np.split(raw, ends, axis=1))

    def _refuse_reserved(self, name: str, rows: Array, dtype: DType) -> None:
        """Raise BadModelFile for a scale that stands for no number."""
        found = find_reserved(rows, dtype)
        if found is not None:
            field = f"{name}: scale of block {found[1]} of row {found[0]}"
            limit = f"{dtype.name} has no such number; download the file again"
            raise BadModelFile(self.file.path, field, found[2], limit)

    def _refuse_zeros(self, name: str, raw: Array) -> None:
        """Raise BadModelFile where all bytes of a tensor are zeros that no model has so.

        Other matrices may be: layers that were put between others add nothing by them.
        """
        if not raw[:1].any() and not raw.any():
            limit = "a model has other numbers there; its download was not finished, repeat it"
            raise BadModelFile(self.file.path, name, Words("zeros alone"), limit)

    def _rows(self, spec: TensorSpec) -> list[np.ndarray[Any, Any]]:
        """GGUF bytes of a matrix, uint8 [rows, row_bytes] for each that it is loaded as."""
        name, (*lead, num_rows, num_columns) = spec.name, spec.shape
        dtype = self._expect(name, spec.shape)
        raw = self._raw(name, dtype).reshape(-1, dtype.num_bytes(num_columns))
        if name in ("token_embd.weight", "output.weight"):
            self._refuse_zeros(name, raw)
        if self.progress:
            self.progress("loading weights", len(self.taken) / len(self.file.tensors))
        if lead:
            ends = np.cumsum(spec.segments_along(-2))[:-1]
            parts = np.split(raw.reshape(*lead, num_rows, -1), ends, axis=1)
            return [packing.stack(part.reshape(-1, raw.shape[1]), *lead) for part in parts]
        return matrix_parts(spec, raw)

    def _raw(self, name: str, dtype: DType) -> Array:
        raw = self.file.raw(name)
        return as_ggml_reads(raw) if dtype is DType.NVFP4 else raw

    def values(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """A tensor that is no matrix, as f32."""
        dtype = self._expect(name, shape)
        if dtype.is_quantised:
            raise UnsupportedModel(
                self.file.path, f"type of {name}", dtype.name, "vectors must be F32, F16 or BF16"
            )
        raw = self.file.raw(name).reshape(1, -1)
        if name.endswith("norm.weight"):
            self._refuse_zeros(name, raw)
        return dequantise(raw, dtype, math.prod(shape)).reshape(shape)

    def numbers(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """A tensor of any type as f32 numbers; its pages of the file are let go."""
        dtype, num_columns = self._expect(name, shape), shape[-1]
        raw = self._raw(name, dtype).reshape(-1, dtype.num_bytes(num_columns))
        self._refuse_reserved(name, raw, dtype)
        values = np.array(dequantise(raw, dtype, num_columns)).reshape(shape)
        if (factors := self._factors(name)) is not None:
            values = values * factors.reshape(-1, *(1,) * (len(shape) - 1))
        self.file.let_go(name)
        return values

    def _expect(self, name: str, shape: tuple[int, ...]) -> DType:
        info = self.file.tensors.get(name)
        if info is None:
            raise self._missing(name)
        if without_leading_ones(info.shape) != without_leading_ones(shape):
            raise BadModelFile(
                self.file.path, f"{name} shape", info.shape, f"the metadata say {shape}"
            )
        self.taken.add(name)
        if info.dtype is DType.NVFP4:
            # Scales of activations are for products of four bits with four.
            self.taken.add(_beside(name, "input_scale"))
            if (scale := self._scale_of(name)) is not None:
                self._expect(scale, _lead(shape))
        return info.dtype

    def _missing(self, name: str) -> BadModelFile:
        first = name.replace("_exps.", ".0.")
        if "_exps." in name and first in self.file.tensors:
            limit = f"experts lie one by one there ({first}), as converters wrote until April 2024"
            return BadModelFile(self.file.path, name, MISSING, limit, "convert the model again")
        return BadModelFile(self.file.path, name, MISSING, f"a {self.arch.name} model needs it")

    def _scale_of(self, name: str) -> str | None:
        """The tensor of factors of a weight of NVFP4, one for the whole or for each expert."""
        scale, experts = _beside(name, "scale"), self.arch.family.experts
        is_of_mixing = experts is not None and experts.has_factors(name)
        return scale if scale in self.file.tensors and not is_of_mixing else None

    def _factors(self, name: str) -> Array | None:
        """The factors of a weight's matrices, f32 [num_matrices]; None for one.

        Raises BadModelFile where one is no number.
        """
        info = self.file.tensors[name]
        scale = self._scale_of(name) if info.dtype is DType.NVFP4 else None
        if scale is None:
            return None
        factors = self.values(scale, _lead(info.shape))
        if not np.isfinite(factors).all():
            place = int(np.flatnonzero(~np.isfinite(factors))[0])
            limit = "a weight cannot be multiplied by it; download the file again"
            raise BadModelFile(self.file.path, f"{scale}[{place}]", float(factors[place]), limit)
        return factors


def matrix_parts(spec: TensorSpec, rows: Array) -> list[Array]:
    """The rows of a matrix, [rows, anything], for each that it is loaded as."""
    ends = np.cumsum(spec.segments or spec.segments_along(-2))[:-1]
    turns = rows.reshape(spec.num_turns, len(rows) // spec.num_turns, rows.shape[1])
    split = np.split(turns, ends // spec.num_turns, axis=1)
    parts = [part.reshape(-1, rows.shape[1]) for part in split]
    if not spec.segments:
        return parts
    *first, last = parts
    return [np.concatenate(first) if len(first) > 1 else first[0], last]


def _beside(name: str, kind: str) -> str:
    return name.removesuffix(".weight") + f".{kind}"


def _lead(shape: tuple[int, ...]) -> tuple[int]:
    """One factor for each matrix of a stack."""
    return (shape[0] if len(shape) == 3 else 1,)
