"""A weight in the layout in which the kernels of a device read it, and its way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor, contiguous_strides
from hypocenter.device import devices, lending, memory
from hypocenter.kernels.weights.cpu_layout import Kept, Read, held_as, pack_records
from hypocenter.kernels.weights.gpu_layout import pack_units
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.wire.messages import SharedWeight


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [num_rows, num_columns] as kernels read it, rows padded to 64 with zeros.

    `parts` on the CPU (`cpu_layout.py`): (weights,) or (records,); on a GPU
    (`gpu_layout.py`): (weights,) or (words, scales, minima, zero, factor).
    value = (scale * (code - zero) + minimum) * factor.
    """

    dtype: DType
    parts: tuple[Any, ...]
    num_rows: int
    num_columns: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays in host memory."""
        return sum(part.nbytes for part in self.parts if isinstance(part, np.ndarray))


def pack(
    raw: Array,
    dtype: DType,
    num_columns: int,
    *,
    device: str = "cpu",
    in_bf16: bool = False,
    kept: Kept | None = None,
    read: Read | None = None,
    on_host: bool = False,
    factors: Array | None = None,
) -> Packed:
    """Bring rows of GGUF bytes (uint8 [num_rows, row_bytes]) into the layout for `device`.

    A GPU packs them itself, unless `on_host`, with which that is compared.
    `in_bf16` (on the CPU): F16 and BF16 become what products in bf16 take. `kept` (on the CPU):
    gives what was packed of them before; `read` is told of rows that are wanted no more. `factors`
    (of NVFP4): f32 [num_matrices], each for an equal part of the rows, by which they are
    multiplied.
    """
    if device == "cpu":
        parts = pack_records(
            [raw], dtype, num_columns, in_bf16=in_bf16, kept=kept, read=read, factors=[factors]
        )
        dtype = held_as(dtype, num_columns, in_bf16=in_bf16)
    elif on_host:
        parts = pack_units(raw, dtype, num_columns, factors=factors)
    else:
        scratch = devices.backend_of(device).scratch
        work = partial(pack_units, raw, dtype, num_columns, scratch, factors=factors)
        parts = devices.call_device(device, "compute", work, raw.nbytes)
    return Packed(dtype, parts, len(raw), num_columns)


def pack_by_turns(
    raws: Sequence[Array],
    dtype: DType,
    num_columns: int,
    *,
    kept: Kept | None = None,
    read: Read | None = None,
    factors: Sequence[Array | None] = (),
) -> Packed:
    """Several matrices of one shape, as rows of GGUF bytes, as one weight for the CPU: 64 rows of
    each by turns, each padded to 64 rows. `read` and the `factors` of each: as of `pack`."""
    num_rows = len(raws) * padded_rows(len(raws[0]))
    parts = pack_records(raws, dtype, num_columns, kept=kept, read=read, factors=factors)
    return Packed(dtype, parts, num_rows, num_columns)


def stack(raw: Array, num_experts: int) -> Array:
    """Rows of as many matrices as there are experts, each padded to 64 rows with zeros.

    `raw` is uint8 [num_experts * num_rows, row_bytes]; zero bytes are zeros in every type. What is
    packed of the result holds the items of an expert behind those of the experts before.
    """
    num_rows = len(raw) // num_experts
    if num_rows == padded_rows(num_rows):
        return raw
    wide = np.zeros((num_experts, padded_rows(num_rows), raw.shape[1]), np.uint8)
    wide[:, :num_rows] = raw.reshape(num_experts, num_rows, -1)
    return wide.reshape(-1, raw.shape[1])


def place(
    name: str,
    owner: str,
    packed: Packed,
    *,
    device: str = "cpu",
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """A weight that was packed for `device` as a Tensor [num_rows, num_columns] there.

    `shape`: that of a stack of experts, [num_experts, num_rows, num_columns].
    """
    shape = shape or (packed.num_rows, packed.num_columns)
    if device == "cpu":
        return memory.adopt(name, owner, packed.dtype, shape, packed, packed.num_bytes)
    allocation, parts = memory.upload(packed.parts, device, name, owner)
    data = replace(packed, parts=parts)
    return Tensor(name, owner, packed.dtype, shape, contiguous_strides(shape), 0, allocation, data)


def borrow(
    name: str,
    weight: SharedWeight,
    borrower: lending.Borrower,
    *,
    shape: tuple[int, ...] | None = None,
) -> Tensor:
    """A packed weight that a process of ours has put into memory of the device, as `place` does."""
    dtype, size = DType[weight.dtype], (weight.num_rows, weight.num_columns)
    allocation, parts = borrower.take(weight.parts, name)
    data, shape = Packed(dtype, parts, *size), shape or size
    return Tensor(name, "model", dtype, shape, contiguous_strides(shape), 0, allocation, data)


def lend(name: str, packed: Packed, lender: lending.Lender) -> SharedWeight:
    """Put a packed weight where other processes may `borrow` it."""
    parts = lender.put(packed.parts, name)
    return SharedWeight(packed.dtype.name, packed.num_rows, packed.num_columns, parts)
