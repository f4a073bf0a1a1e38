"""What of a view's memory is its own: stretches of one length, each so far from the one before.

A guard compares numbers for each access, so it takes two and no strides. Needs no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: The format is that of ops_gpu.py.
_ROW_BITS = 31


@dataclass(frozen=True, slots=True)
class ViewRows:
    """A view's stretches of memory: `row_bytes` of each `pitch_bytes` are its own.

    Not `is_whole`: some of what lies between them looks like a row and is none, since the view has
    gaps of several sizes.
    """

    pitch_bytes: int
    row_bytes: int
    is_whole: bool = True

    @property
    def word(self) -> int:
        """As `ops_gpu.py` takes it."""
        return self.pitch_bytes << _ROW_BITS | self.row_bytes

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> ViewRows | None:
        """Those of a view, with its strides in elements; None of one whose gaps no row tells.

        The element of an index lies at a multiple of the pitch and less than a row, as long as all
        larger strides are multiples of it.
        """
        if 0 in shape or min(strides, default=0) < 0:
            return None
        pairs = [(by, size) for size, by in zip(shape, strides, strict=True) if size > 1 and by]
        row, pitch, reach = 1, 0, 0
        is_whole = True
        for by, size in sorted(pairs):
            if not pitch and by <= row:
                row += (size - 1) * by
                continue
            if pitch and by % pitch:
                return None
            is_whole = is_whole and (not pitch or by <= reach)
            pitch, reach = pitch or by, max(reach, by * size)
        if not pitch or pitch * item_bytes >= 1 << _ROW_BITS:
            return None
        return cls(pitch * item_bytes, row * item_bytes, is_whole)


def rows_of(array: Any) -> ViewRows | None:
    """Those of a view (torch or numpy); None of what lies packed, and of None."""
    if array is None:
        return None
    if hasattr(array, "element_size"):  # torch
        if array.is_contiguous():
            return None
        return ViewRows.of(array.shape, array.stride(), array.element_size())
    if not hasattr(array, "strides") or array.flags.c_contiguous:
        return None
    strides = [by // array.itemsize for by in array.strides]
    return ViewRows.of(array.shape, strides, array.itemsize)
