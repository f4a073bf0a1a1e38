"""Importance matrices: how much each column of a weight counts, as llama.cpp's `imatrix` measures.

Both of its formats are read: the GGUF file, and the .dat file from before. Neither is trusted:
every count is held against what is left of the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hypocenter.base.dtypes import Float32s
from hypocenter.base.errors import MISSING, BadModelFile, UsageError, Words
from hypocenter.base.tensor import DType
from hypocenter.model.gguf.file import GGUFFile, open_gguf, require_file
from hypocenter.model.gguf.values import StringArray

#: Of a .dat file, which is read whole; those of the largest models have 1 GiB.
MAX_BYTES = 4 << 30
MAX_ENTRIES = 1 << 16
MAX_NAME_BYTES = 127
_MAX_DATASET_BYTES = 1 << 16
#: Of a weight, a mean of squares of activations. Searches multiply sums of up to 256 of them with
#: each other; beyond this f32 finds infinities there.
_MAX_WEIGHT = np.float32(1 << 48)
#: Of the largest weight of a matrix: products of two below it are zeros in f32.
_LEAST_LARGEST = np.float32(1e-20)
_SUMS, _COUNTS = ".in_sum2", ".counts"
_WAY_OUT = "make it anew with llama-imatrix"


@dataclass(frozen=True, slots=True)
class Importance:
    """f32 [num_matrices * num_columns] by the name of the tensor: what each column counts.

    `num_chunks` and `dataset`: what it was measured on; 0 and "" where the file does not say.
    """

    path: Path
    weights: Mapping[str, Float32s]
    num_chunks: int
    dataset: str


def read_importance(path: str | Path) -> Importance:
    """Read either format. Raises UsageError where there is no file, BadModelFile for what is none
    or is broken, also for a number that is not finite or too large."""
    path = Path(path)
    require_file(path)
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    found = _of_gguf(path) if is_gguf else _of_dat(path)
    if not found.weights:
        raise BadModelFile(path, "number of entries", 0, "it must be above 0", _WAY_OUT)
    for name, values in found.weights.items():
        if not np.isfinite(values).all():
            raise _refusal(path, f"weight of {name!r}", _first_bad(values), "it must be finite")
        if (values > _MAX_WEIGHT).any():
            limit = f"the limit is {_MAX_WEIGHT:g}"
            raise _refusal(path, f"weight of {name!r}", Words(f"{values.max():g}"), limit)
        if (values < 0).any():
            raise _refusal(
                path, f"weight of {name!r}", float(values.min()), "it must be at least 0"
            )
    return found


def _of_gguf(path: Path) -> Importance:
    with open_gguf(path) as file:
        for key in ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"):
            if key not in file.metadata:
                raise _refusal(path, key, MISSING, "an importance matrix has it")
        names = [name.removesuffix(_SUMS) for name in file.tensors if name.endswith(_SUMS)]
        weights = {name: _mean(file, name) for name in names}
        datasets = file.metadata["imatrix.datasets"]
        dataset = datasets[0] if isinstance(datasets, StringArray) and len(datasets) else ""
        return Importance(path, weights, file.integer("imatrix.chunk_count"), dataset)


def _mean(file: GGUFFile, name: str) -> Float32s:
    """Sums by the number of tokens that each matrix has seen; 1 where it has seen none."""
    sums, counts = _floats(file, name + _SUMS), _floats(file, name + _COUNTS)
    if sums.size % counts.size:
        limit = f"it must be a multiple of its {counts.size} counts"
        raise _refusal(file.path, f"length of {name + _SUMS!r}", sums.size, limit)
    # Halves go away from zero, as C's lround has them; counts are whole in files of llama-imatrix.
    whole = np.trunc(counts + np.copysign(np.float32(0.5), counts)).astype(np.float32)[:, None]
    rows = sums.reshape(counts.size, -1)
    seen = np.where(whole > 0, whole, np.float32(1))
    return np.where(whole > 0, rows / seen, np.float32(1)).reshape(-1)


def _floats(file: GGUFFile, name: str) -> Float32s:
    info = file.tensors.get(name)
    if info is None:
        raise _refusal(
            file.path, "tensor", name, "sums and counts come in pairs, and it is missing"
        )
    if info.dtype is not DType.F32:
        raise _refusal(file.path, f"type of {name!r}", info.dtype.name, "it must be F32")
    return file.raw(name).view(np.float32)


def _of_dat(path: Path) -> Importance:
    num_bytes = path.stat().st_size
    if num_bytes > MAX_BYTES:
        raise _refusal(path, "file size in bytes", num_bytes, f"the limit is {MAX_BYTES}")
    reader = _Reader(path, path.read_bytes())
    weights = {}
    for number in range(reader.count("number of entries", MAX_ENTRIES, low=1)):
        what = f"entry {number}"
        name = reader.text(f"name of {what}", MAX_NAME_BYTES)
        num_calls = reader.integer(f"calls of {what}")
        size = reader.count(f"length of {what}", MAX_BYTES // 4, low=1)
        values = reader.floats(f"weights of {what}", size)
        weights[name] = values / np.float32(num_calls) if num_calls > 0 else values
    num_chunks, dataset = 0, ""
    if reader.left:
        num_chunks = reader.integer("number of chunks")
    if reader.left:
        dataset = reader.text("name of the text", _MAX_DATASET_BYTES)
    return Importance(path, weights, max(num_chunks, 0), dataset)


class _Reader:
    """Reads forward through a .dat file: little-endian, without a word that says what it is."""

    def __init__(self, path: Path, data: bytes) -> None:
        self._path, self._data, self._at = path, data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def _take(self, what: str, num_bytes: int) -> int:
        if num_bytes > self.left:
            limit = f"{self.left} of the {len(self._data)} bytes are left"
            raise _refusal(self._path, f"{what}, size in bytes,", num_bytes, limit)
        self._at += num_bytes
        return self._at - num_bytes

    def integer(self, what: str) -> int:
        return int(struct.unpack_from("<i", self._data, self._take(what, 4))[0])

    def count(self, what: str, high: int, *, low: int = 0) -> int:
        found = self.integer(what)
        if not low <= found <= high:
            raise _refusal(self._path, what, found, f"it must be from {low} to {high}")
        return found

    def text(self, what: str, max_bytes: int) -> str:
        size = self.count(f"length of the {what}", max_bytes)
        start = self._take(what, size)
        raw = self._data[start : start + size].split(b"\0")[0]
        return raw.decode("utf-8", "surrogateescape")

    def floats(self, what: str, size: int) -> Float32s:
        return np.frombuffer(self._data, "<f4", size, self._take(what, 4 * size))


def _first_bad(values: Float32s) -> float:
    return next(float(value) for value in values if not math.isfinite(value))


def refusal_of_range(
    importance: Importance, name: str, weights: Float32s, what: str
) -> BadModelFile:
    """Says that `what` of a tensor can be written with equal weights, but not with these."""
    ends = Words(f"from {weights.min():g} to {weights.max():g}")
    limit = f"{what} cannot be written with them, and can with equal ones"
    return _refusal(importance.path, f"weights of {name!r}", ends, limit)


def _refusal(path: Path, field: str, value: object, limit: str) -> BadModelFile:
    return BadModelFile(path, field, value, limit, _WAY_OUT)


def weights_of(
    importance: Importance | None, name: str, size: int, num_matrices: int = 1
) -> Float32s | None:
    """What the columns of a tensor's matrices count; None where the file does not say it.

    Raises UsageError where it has another number of them than `size`, that is, was measured on
    another model; BadModelFile where no column of a matrix counts anything.
    """
    values = None if importance is None else importance.weights.get(name)
    if importance is not None and values is not None and values.size != size:
        raise UsageError(
            f"{importance.path}: {name!r} has {values.size} weights, but the tensor has {size} "
            "columns; give the importance matrix of this model"
        )
    if importance is not None and values is not None:
        largest = values.reshape(num_matrices, -1).max(axis=1)
        for matrix in np.flatnonzero(largest < _LEAST_LARGEST):
            of_matrix = f"matrix {matrix} of " if num_matrices > 1 else ""
            field = f"largest weight of {of_matrix}{name!r}"
            limit = f"it must be at least {_LEAST_LARGEST:g}, or all columns count nothing"
            raise _refusal(importance.path, field, Words(f"{largest[matrix]:g}"), limit)
    return values
