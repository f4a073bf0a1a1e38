"""Which bytes a tensor has, and whether two of them share one; counts elements, reads nothing."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array

#: A tensor of more runs of bytes than this is not listed, and what it shares is not known.
MAX_RUNS = 1 << 14


class Extent(NamedTuple):
    """The elements of a tensor: `strides` count elements of `item_bytes`."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @property
    def span(self) -> tuple[int, int]:
        """First byte, and the byte behind the last one; the same where there is no element."""
        if 0 in self.shape:
            return self.address, self.address
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.address, self.address + (last + 1) * self.item_bytes

    @property
    def is_dense(self) -> bool:
        """Whether it has every byte of its span."""
        num, (start, end) = self.item_bytes, self.span
        for n in self.shape:
            num *= n
        return num == end - start


def bytes_at(address: int, num_bytes: int) -> Extent:
    """One without gaps."""
    return Extent(address, (num_bytes,), (1,), 1)


def share(one: Extent, other: Extent) -> bool | None:
    """Whether they have a byte in common; None where that is not found out."""
    if one == other:
        return 0 not in one.shape
    (start, end), (begin, stop) = one.span, other.span
    if start >= stop or begin >= end:
        return False
    if one.is_dense and other.is_dense:
        return True
    starts, ends = _runs(one)
    begins, stops = _runs(other)
    if not len(starts) or not len(begins):
        return None
    # The first run of the other that ends behind a run's start; it may begin before its end.
    at = np.searchsorted(stops, starts, side="right")
    inside = at < len(begins)
    return bool((begins[at[inside]] < ends[inside]).any())


def covers(one: Extent, other: Extent) -> bool:
    """Whether `one` surely has every byte of `other`."""
    if one == other:
        return True
    (start, end), (begin, stop) = one.span, other.span
    return one.is_dense and start <= begin and stop <= end


@functools.lru_cache(maxsize=256)
def _runs(region: Extent) -> tuple[Array, Array]:
    """Starts and ends of runs of bytes, in order and apart; empty where they are too many."""
    width = region.item_bytes
    axes = sorted(
        (abs(s) * region.item_bytes, n)
        for n, s in zip(region.shape, region.strides, strict=True)
        if n > 1 and s
    )
    while axes and axes[0][0] == width:
        width *= axes.pop(0)[1]
    num = 1
    for _, n in axes:
        num *= n
    if num > MAX_RUNS:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.array([region.address], np.int64)
    for stride, n in axes:
        starts = (starts[:, None] + stride * np.arange(n, dtype=np.int64)).ravel()
    starts.sort()
    # Runs that overlap would not be in order of their ends; those of one width are.
    return starts, starts + width
