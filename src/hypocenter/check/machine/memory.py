"""The arguments of a launch as memory of a GPU, so far apart that a wild access has one origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import UsageError

#: Each argument lies in the middle of a space of its own: 32-bit offsets never reach the next.
SPACE_BYTES = 1 << 36
_FIRST = 1 << 44
MAX_ARGUMENTS = 512
MAX_BYTES = 4 << 30
_NULL_BYTES = 1 << 16


class UnwrittenArray(np.ndarray):
    """An array that nobody has written: what torch.empty and hipMalloc give.

    `written` are the bytes that launches have written since, bool[bytes]; None where none has.
    """

    written: Array | None = None


def unwritten(shape: int | tuple[int, ...], dtype: object = np.float32) -> Array:
    """An array for a launch that nobody has written; a kernel that reads it first is told of."""
    made = np.empty(shape, dtype)  # type: ignore[call-overload]
    made.reshape(-1).view(np.uint8)[:] = 0xFF
    found: Array = made.view(UnwrittenArray)
    return found


class FreedArray(np.ndarray):
    """An array whose memory was given back before the launch."""


def free(array: Array) -> Array:
    """The same array as an argument that was freed: every access to it is told of."""
    found: Array = array.view(FreedArray)
    return found


@dataclass(slots=True)
class ArrayRegion:
    """One array: `is_known` says of each byte whether it was written; the blocks that touched it.

    `writer` is the block that wrote a byte last, `first_reader` and `last_reader` the lowest and
    highest number of a block that read it; -1 where there is none. `shadow` are the bytes as they
    were after the last block.
    """

    name: str
    array: Array
    address: int
    data: Array
    is_known: Array
    is_freed: bool
    writer: Array = field(init=False)
    first_reader: Array = field(init=False)
    last_reader: Array = field(init=False)
    shadow: Array = field(init=False)

    def __post_init__(self) -> None:
        self.writer, self.first_reader, self.last_reader = (
            np.full(self.data.size, -1, np.int32) for _ in range(3)
        )
        self.shadow = self.data.copy()

    @property
    def end(self) -> int:
        return self.address + self.data.size


class ArgumentMemory:
    """Memory that holds the arrays of one launch and nothing else."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.regions_by_name: dict[str, ArrayRegion] = {}
        self._held: list[ArrayRegion] = []
        self._listed: list[ArrayRegion] = []
        same: dict[tuple[int, int], ArrayRegion] = {}
        if len(arrays) > MAX_ARGUMENTS:
            raise UsageError(f"a launch has {len(arrays)} arrays, limit {MAX_ARGUMENTS}")
        for name, array in arrays.items():
            if not array.flags.c_contiguous:
                raise UsageError(
                    f"{name} has gaps between its elements; pass np.ascontiguousarray({name})"
                )
            key = (array.ctypes.data, array.nbytes)
            if key not in same:
                same[key] = self._add(name, array)
            self.regions_by_name[name] = same[key]
        self._refuse_too_much()

    def _add(self, name: str, array: Array) -> ArrayRegion:
        address = _FIRST + len(self._held) * SPACE_BYTES + SPACE_BYTES // 2
        data = np.asarray(array).reshape(-1).view(np.uint8)
        region = ArrayRegion(
            name,
            np.asarray(array),
            address,
            data,
            _known_bytes(array, data.size),
            isinstance(array, FreedArray),
        )
        self._held.append(region)
        return region

    def _refuse_too_much(self) -> None:
        if sum(region.data.size for region in (*self._held, *self._listed)) > MAX_BYTES:
            raise UsageError(f"the arrays of a launch have more than {MAX_BYTES} bytes")

    def list_at(self, address: int, name: str, array: Array) -> None:
        """Memory that a kernel finds by an address in an array: it lies there and no further."""
        data = array.reshape(-1).view(np.uint8)
        region = ArrayRegion(name, array, address, data, np.full(data.size, True), False)
        self._listed.append(region)
        self._refuse_too_much()

    def written_in_part(self) -> Iterator[str]:
        """Arrays of which a launch wrote some elements and left others as they were."""
        for region in self._held:
            size = region.array.itemsize
            written = (region.writer >= 0)[: region.data.size // size * size].reshape(-1, size)
            is_written = written.any(axis=1)
            if is_written.any() and not is_written.all():
                first = np.unravel_index(int(np.argmin(is_written)), region.array.shape)
                place = ", ".join(str(int(index)) for index in first)
                yield (
                    f"{region.name} is written in {int(is_written.sum())} of {is_written.size} "
                    f"elements, and not in [{place}] (no finding)"
                )

    def contents(self) -> Iterator[bytes]:
        """What is left in the arrays, and which bytes of each somebody wrote."""
        for region in (*self._held, *self._listed):
            yield region.data[region.is_known].tobytes()
            yield region.is_known.tobytes()

    @property
    def held(self) -> tuple[ArrayRegion, ...]:
        return tuple(self._held)

    def region_of(self, address: int) -> ArrayRegion | None:
        """The array in whose space an address lies, inside of it or not; one that is listed only
        inside."""
        for region in self._listed:
            if region.address <= address < region.end:
                return region
        number = (address - _FIRST) // SPACE_BYTES
        return self._held[number] if 0 <= number < len(self._held) else None

    # -- what the executor asks for ---------------------------------------------------------------

    def regions(self) -> Array:
        rows = [
            (region.address, region.end, region.data.ctypes.data, 1, 0)
            for region in (*self._held, *self._listed)
            if not region.is_freed
        ]
        return np.array(rows, np.int64).reshape(-1, 5)

    def make_ready(self, address: int) -> None:
        """All of it is there."""


def _known_bytes(array: Array, num_bytes: int) -> Array:
    """Which bytes of an array were written; the launch marks in it what it writes."""
    if not isinstance(array, UnwrittenArray):
        return np.full(num_bytes, True)
    if array.written is None:
        array.written = np.full(num_bytes, False)
    return array.written


def is_null(address: int) -> bool:
    """Whether an address is a null pointer with a small offset."""
    return 0 <= address < _NULL_BYTES
