"""Tensors that the host fills before each step: they share one allocation, so that one copy does.

A copy to a GPU costs the host some 30 us whatever its size, and the GPU waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hypocenter.base.dtypes import Int32s
from hypocenter.base.tensor import DType, Tensor, contiguous_strides
from hypocenter.device import copies, memory

#: Each tensor begins at a multiple of so many elements: 256 bytes.
_ALIGNMENT = 64


class Inputs:
    """`tensors` of i32 on `device`, zeroed, in the order of `shapes`.

    Of the last one, a matrix, a copy takes the rows that are filled; the others are copied whole.
    What gets there in another way than by `put` lasts until the next one.
    """

    def __init__(
        self, name: str, owner: str, shapes: Mapping[str, tuple[int, ...]], *, device: str
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._host: dict[int, tuple[Int32s, int]] = {}  # of each tensor its values, and their start
        self._tails: dict[int, Tensor] = {}  # what lies behind a start
        starts, end = [], 0
        for shape in shapes.values():
            starts.append(end)
            end += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        self._whole = memory.allocate(name, owner, DType.I32, (end,), device=device)
        is_host = device == "cpu"
        self._values: Int32s = self._whole.data if is_host else np.zeros(end, np.int32)
        for (label, shape), start in zip(shapes.items(), starts, strict=True):
            view = memory.rows(self._whole, start, start + math.prod(shape))
            values = self._values[start : start + view.shape[0]].reshape(shape)
            tensor = Tensor(
                label,
                owner,
                DType.I32,
                shape,
                contiguous_strides(shape),
                start,
                self._whole.allocation,
                values if is_host else view.data,
            )
            self.tensors[label] = tensor
            self._host[id(tensor)] = values, start

    def put(self, filled: Sequence[tuple[Tensor, Int32s]], *, is_recorded: bool = False) -> None:
        """Fill the leading part of each tensor, as `copies.to_device` does, by one copy.

        The rest of the rows of a matrix that are filled becomes zero. What lies before the first of
        them stays as it is. A tensor that is none of these is copied by itself. Raises
        CopyRejected, and then none of these has changed.
        """
        ours = [copy for copy in filled if id(copy[0]) in self._host]
        if len(ours) < len(filled):
            for tensor, given in filled:
                if id(tensor) not in self._host:
                    copies.to_device(tensor, given, is_recorded=is_recorded)
        copies.refuse_unfit(self._whole, ours)
        first, end = self._whole.shape[0], 0
        for tensor, given in ours:
            values, start = self._host[id(tensor)]
            num_rows = len(given)
            if given.ndim == 1:
                values[:num_rows] = given
            else:
                values[:num_rows, : given.shape[1]] = given
                values[:num_rows, given.shape[1] :] = 0
            first, end = min(first, start), max(end, start + num_rows * tensor.strides[0])
        if self._whole.device != "cpu" and first < end:
            copies.to_device(self._tail(first), self._values[first:end], is_recorded=is_recorded)

    def _tail(self, start: int) -> Tensor:
        if start not in self._tails:
            self._tails[start] = memory.rows(self._whole, start, self._whole.shape[0])
        return self._tails[start]
