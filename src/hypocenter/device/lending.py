"""Memory of one process that others use where it lies: packed weights, and room for tensors."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from hypocenter.base.tensor import Allocation, DType, Tensor
from hypocenter.device import memory
from hypocenter.device.copies import NUMPY_TYPES
from hypocenter.device.devices import call_device, names_of
from hypocenter.wire.messages import SharedPart, SharedPiece

#: Memory is shared by pieces of this size or, for what is larger, of its own.
_PIECE_BYTES = 64 << 20
_LABEL = "shared weights (model)"
#: At which tensors begin in lent room.
_ROOM_ALIGNMENT_BYTES = 512


class Lender:
    """Puts packed weights into memory that other processes may map."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.pieces: list[SharedPiece] = []
        self._address, self._used = 0, 0
        #: Pieces that are taken and still empty: where each lies, and what others map it by.
        self._ahead: deque[tuple[int, SharedPiece]] = deque()

    def take_ahead(self, piece_bytes: Sequence[int]) -> tuple[SharedPiece, ...]:
        """Take the pieces that will be filled, in their order. Raises OutOfMemory, NotShareable."""
        self._ahead.extend(map(self._allocate, piece_bytes))
        return tuple(piece for _, piece in self._ahead)

    def put(self, parts: tuple[Any, ...], name: str) -> tuple[SharedPart | float, ...]:
        """Copy the arrays among `parts`; where they lie. Raises NotShareable, DeviceFault."""
        num_bytes = memory.packed_bytes(parts)
        if not self.pieces or self._used + num_bytes > self.pieces[-1].num_bytes:
            self._take_piece(max(num_bytes, _PIECE_BYTES))
        placed = memory.copy_parts(
            parts, self._device, f"{name} (model)", self._address + self._used
        )
        self._used += num_bytes
        return tuple(
            self._place_of(part) if isinstance(part, memory.PackedArray) else float(part)
            for part in placed
        )

    def _take_piece(self, num_bytes: int) -> None:
        if self._ahead and self._ahead[0][1].num_bytes == num_bytes:
            self._address, piece = self._ahead.popleft()
        else:
            self._address, piece = self._allocate(num_bytes)
        self.pieces.append(piece)
        self._used = 0

    def _allocate(self, num_bytes: int) -> tuple[int, SharedPiece]:
        address, handle = call_device(self._device, "allocate_shared", num_bytes)
        names_of(self._device)[address] = _LABEL
        return address, SharedPiece(handle, num_bytes)

    def _place_of(self, part: memory.PackedArray) -> SharedPart:
        offset = part.address - self._address
        number = len(self.pieces) - 1
        return SharedPart(number, offset, part.num_bytes, part.dtype, part.num_elements)


class Borrower:
    """Maps the memory of a lender. Raises NotShareable."""

    def __init__(self, device: str, pieces: Sequence[SharedPiece]) -> None:
        self._device = device
        self._addresses: list[int] = []
        for piece in pieces:
            address = call_device(device, "map_shared", piece.handle, piece.num_bytes)
            names_of(device)[address] = _LABEL
            self._addresses.append(address)

    def take(
        self, parts: Sequence[SharedPart | float], name: str
    ) -> tuple[Allocation, tuple[Any, ...]]:
        """As `memory.upload` returns it, of a weight that lies there already."""
        arrays = [part for part in parts if isinstance(part, SharedPart)]
        begin = min(self._address(part) for part in arrays)
        end = max(self._address(part) + part.num_bytes for part in arrays)
        allocation = memory.note_allocation(
            self._device, end - begin, begin, name, "model", "mapped"
        )
        return allocation, tuple(self._part(part) for part in parts)

    def _address(self, part: SharedPart) -> int:
        return self._addresses[part.piece] + part.offset

    def _part(self, part: SharedPart | float) -> Any:
        if not isinstance(part, SharedPart):
            return np.float32(part)
        return memory.packed_array(
            self._device, self._address(part), DType[part.dtype], part.num_elements, part.num_bytes
        )


def lend_room(device: str, num_bytes: int, label: str) -> SharedPiece:
    """Zeroed memory that other processes map. Raises NotShareable, OutOfMemory."""
    address, handle = call_device(device, "allocate_shared", num_bytes)
    names_of(device)[address] = label
    call_device(device, "clear", address, num_bytes)
    call_device(device, "synchronise")
    return SharedPiece(handle, num_bytes)


def room_bytes(num_bytes: int) -> int:
    """What a tensor of so many bytes takes of lent room."""
    return -(-num_bytes // _ROOM_ALIGNMENT_BYTES) * _ROOM_ALIGNMENT_BYTES


class LentRoom:
    """Memory of another process in which tensors are placed, one behind the other.

    Whoever places the same ones in the same order finds in them what was left there. Raises
    NotShareable.
    """

    def __init__(self, device: str, piece: SharedPiece) -> None:
        self.device = device
        self._address = call_device(device, "map_shared", piece.handle, piece.num_bytes)
        self._end = self._address + piece.num_bytes

    def take(self, name: str, owner: str, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        """The next tensor; what lies in it stays."""
        num_elements = math.prod(shape)
        num_bytes = num_elements * np.dtype(NUMPY_TYPES[dtype]).itemsize
        begin, self._address = self._address, self._address + room_bytes(num_bytes)
        assert self._address <= self._end, (name, self._address, self._end)
        names_of(self.device)[begin] = f"{name} ({owner})"
        return memory.tensor_at(self.device, begin, name, owner, dtype, shape, "mapped")
