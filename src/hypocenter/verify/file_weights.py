"""The numbers of a model's weights as its file has them, for whom packed ones are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.kernels.weights import block_types, gpu_layout
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors.table import tensor_table
from hypocenter.model.tensors.tensor_reader import matrix_parts

#: Rows that are looked at together where a whole matrix would take much memory.
_SLAB_ROWS = 1024


class NotInFile(Exception):
    """A weight is no tensor of the file as it lies there; the text says why."""


@dataclass(frozen=True, slots=True)
class FileMatrix:
    """Rows of a matrix as GGUF bytes, uint8 [num_rows, row_bytes]."""

    raw: Array
    dtype: DType
    num_columns: int

    def exact(self, rows: Array) -> Array:
        """The numbers of some rows, f64 [len(rows), num_columns]."""
        values = block_types.dequantise(self.raw[rows], self.dtype, self.num_columns)
        return values.astype(np.float64)

    def on_gpu(self, rows: Array) -> Array:
        """The same as GPU products multiply them: of block types rounded to f16."""
        if not self.dtype.is_quantised:
            return self.exact(rows)
        # The factor that makes room in f16 is that of the largest scales, wherever they are.
        wanted = np.concatenate([rows, np.array(list(self._largest()), np.int64)])
        return gpu_layout.reference(self.raw[wanted], self.dtype, self.num_columns)[: len(rows)]

    def sizes(self, rows: Array) -> Array:
        """|code * scale| + |minimum| of each number, which its rounding is a share of."""
        if not self.dtype.is_quantised:
            return np.abs(self.exact(rows))
        blocks = block_types.unpack(self.raw[rows], self.dtype, self.num_columns)
        return block_sizes(blocks)

    def _largest(self) -> Iterator[int]:
        """The rows with the largest scale and the largest minimum."""
        best = [(-1.0, 0), (-1.0, 0)]
        for start in range(0, len(self.raw), _SLAB_ROWS):
            slab = self.raw[start : start + _SLAB_ROWS]
            blocks = block_types.unpack(slab, self.dtype, self.num_columns)
            for at, values in enumerate((blocks.scales, blocks.minima)):
                if values is not None:
                    sizes = np.abs(values).max(axis=1)
                    row = int(sizes.argmax())
                    best[at] = max(best[at], (float(sizes[row]), start + row))
        for _, row in best:
            yield row


def block_sizes(blocks: block_types.Blocks) -> Array:
    """|code * scale| + |minimum| of each number, f32 [num_rows, num_columns]."""
    num_rows = len(blocks.codes)
    sizes = np.abs(blocks.codes.reshape(num_rows, -1, blocks.group) * blocks.scales[..., None])
    if (minima := blocks.minima) is not None:
        sizes = sizes + np.abs(minima)[..., None]
    found: Array = sizes.reshape(num_rows, -1)
    return found


def matrices_of(file: GGUFFile, weight: Tensor) -> tuple[FileMatrix, ...]:
    """The matrices that a packed weight was made of: one, or several that lie by turns.

    Raises NotInFile where the file's tensors do not have its rows as they are.
    """
    names = weight.name.split(" + ")
    found = []
    for name in names:
        info = file.tensors.get(name)
        if info is None:
            raise NotInFile(f"{name} is a part of a tensor of the file, or made of several")
        columns = weight.shape[-1]
        if len(info.shape) != 2 or info.shape[-1] != columns:
            raise NotInFile(f"{name} is {list(info.shape)} in the file, and {weight.shape} here")
        if info.dtype is DType.NVFP4:
            raise NotInFile(f"{name} has factors in another tensor")
        raw = file.raw(name).reshape(-1, info.dtype.num_bytes(columns))
        found.append(FileMatrix(raw, info.dtype, columns))
    if len(found) == 1 and len(found[0].raw) != weight.shape[0]:
        return (_part_of(file, names[0], found[0], weight.shape[0]),)
    return tuple(found)


def _part_of(file: GGUFFile, name: str, whole: FileMatrix, num_rows: int) -> FileMatrix:
    """The part of a tensor that is loaded as a matrix of so many rows by itself."""
    specs = tensor_table(read_architecture(file), file.tensors)
    parts = [
        part
        for spec in specs
        if spec.name == name
        for part in matrix_parts(spec, whole.raw)
        if len(part) == num_rows
    ]
    if len(parts) != 1:
        raise NotInFile(f"{name} has {len(whole.raw)} rows, and {num_rows} here are one of several")
    return replace(whole, raw=parts[0])


def expert_matrices_of(file: GGUFFile, weight: Tensor) -> tuple[FileMatrix, ...]:
    """The matrices that packed weights of experts [num_experts, num_outputs, num_columns] were made
    of: the rows of each expert lie behind those of the one before. Raises as `matrices_of`."""
    found = []
    names = weight.name.split(" + ")
    for name in names:
        info = file.tensors.get(name)
        if info is None:
            raise NotInFile(f"{name} is a part of a tensor of the file, or made of several")
        num_experts, _, columns = weight.shape
        if len(info.shape) != 3 or (info.shape[0], info.shape[-1]) != (num_experts, columns):
            raise NotInFile(f"{name} is {list(info.shape)} in the file, and {weight.shape} here")
        if info.dtype is DType.NVFP4:
            raise NotInFile(f"{name} has factors in another tensor")
        raw = file.raw(name).reshape(-1, info.dtype.num_bytes(columns))
        found.append(FileMatrix(raw, info.dtype, columns))
    if len(names) == 1 and len(found[0].raw) != weight.shape[0] * weight.shape[1]:
        raise NotInFile(f"{names[0]} has {len(found[0].raw)} rows, and {weight.shape} is here")
    return tuple(found)
