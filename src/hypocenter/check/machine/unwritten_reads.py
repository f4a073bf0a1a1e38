"""Which reads of what nobody wrote count, of a launch of machine code: those that reach a result.

A kernel may load more than it needs and choose afterwards. So the launch is run again with other
numbers where nobody wrote, as `hypo check` does with Triton's programs. Runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.check.machine.accesses import UnwrittenBytes
from hypocenter.check.machine.widths import Value, copy_arguments
from hypocenter.replay.corrections import nearest
from hypocenter.replay.undefined import harmless

#: What a launch leaves with these arguments and this begin of LDS; None where it is not known.
Leaves = Callable[[Mapping[str, Value], Array], Sequence[Any] | None]


def harmless_rows(
    unwritten: UnwrittenBytes, before: Mapping[str, Value], local_bytes: int, leaves: Leaves
) -> set[int]:
    """The rows of code whose reads of what nobody wrote change nothing of what is left.

    Tried with zeros, NaN, and large numbers of either sign; of several rows each alone as well.
    """

    def results(numbers: Mapping[tuple[str | None, int], float | None]) -> Sequence[Any] | None:
        given, local = copy_arguments(before), np.zeros(local_bytes, np.uint8)
        for (name, row), number in numbers.items():
            places = unwritten[name, row]
            if name is None:
                _fill(local, np.dtype(np.float32), places, number)
            else:
                array = given[name]
                assert isinstance(array, np.ndarray)
                _fill(array.reshape(-1).view(np.uint8), array.dtype, places, number)
        return leaves(given, local)

    spared = harmless(set(unwritten), results)
    kept = {row for _, row in unwritten.keys() - spared}
    return {row for _, row in spared} - kept


def _fill(data: Array, dtype: np.dtype[Any], places: Array, number: float | None) -> None:
    """Put `number` as an element of `dtype` at these bytes; None sets every bit: NaN, or -1."""
    element = np.full(dtype.itemsize, 0xFF, np.uint8)
    if number is not None:
        element = nearest(number, dtype)
    data[places] = np.resize(element, data.size)[places]
