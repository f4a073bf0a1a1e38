"""What two tensors held that a program compared, as numbers, and what the comparison lets pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES, Array
from hypocenter.doctor.case import Case
from hypocenter.doctor.diagnosis import LastWriter
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.compared import ComparedSide, ComparedUnequal

if TYPE_CHECKING:
    from hypocenter.replay.numbers import NumbersMade

#: By type how far a replay may be from what a GPU stored, as a share of the largest number.
_ROUNDING = {"F16": 1e-2, "F32": 1e-4}


@dataclass(frozen=True, slots=True)
class ComparedNumbers:
    """A side, what it was compared with, and what may be between them; one axis, row by row."""

    given: Array
    wanted: Array
    rtol: float
    atol: float
    is_second: bool

    def num_wrong(self, numbers: Array) -> int:
        """Elements that the comparison would not let pass."""
        return int(self.are_wrong(numbers).sum())

    def are_wrong(self, numbers: Array) -> Array:
        """Of each element whether the comparison would not let it pass."""
        limit = self.atol + self.rtol * np.abs(numbers if self.is_second else self.wanted)
        wrong: Array = ~(np.abs(numbers - self.wanted) <= limit)
        return wrong


@dataclass(frozen=True, slots=True)
class StoredSide:
    """A side of a comparison that is all of a tensor which a launch wrote as `parameter`."""

    use: LaunchMade
    parameter: str
    dtype: str
    compared: ComparedNumbers

    def numbers_in(self, made: NumbersMade | None) -> Array | None:
        """What a replay left in it, row by row, where it wrote each element a finite number."""
        left = made.results.get(self.parameter) if made is not None else None
        if left is None or left.dtype != self.dtype or not left.is_written.all():
            return None
        numbers: Array = left.rows.view(NUMPY_DTYPES[self.dtype]).astype(np.float64).reshape(-1)
        is_whole = numbers.size == self.compared.given.size and np.isfinite(numbers).all()
        return numbers if is_whole else None

    def is_found_by(self, made: NumbersMade | None) -> bool:
        """Whether a replay stores what the program found, in each element, and as wrong."""
        numbers, given = self.numbers_in(made), self.compared.given
        if numbers is None:
            return False
        return self.is_near(numbers, given) and self.compared.num_wrong(numbers) > 0

    def is_near(self, numbers: Array, given: Array) -> bool:
        """Whether what a replay stores is what was found, but for sums in another order."""
        return bool(np.abs(numbers - given).max() <= _ROUNDING[self.dtype] * np.abs(given).max())

    def wrong_ones_change(self, before: NumbersMade, after: NumbersMade | None) -> bool:
        """Whether another replay leaves another number in each element that is wrong."""
        numbers = self.numbers_in(before)
        if after is None or numbers is None or self.parameter not in after.results:
            return False
        was, now = (
            made.results[self.parameter].rows.view(NUMPY_DTYPES[self.dtype]).reshape(-1)
            for made in (before, after)
        )
        return bool((was != now)[self.compared.are_wrong(numbers)].all())

    def is_right_in(self, before: NumbersMade, after: NumbersMade | None) -> bool:
        """Whether each element passes in another replay, and no other tensor is another."""
        numbers = self.numbers_in(after)
        if after is None or numbers is None or before.results.keys() != after.results.keys():
            return False
        others = before.results.keys() - {self.parameter}
        are_same = all(
            np.array_equal(before.results[name].rows, after.results[name].rows) for name in others
        )
        return are_same and self.compared.num_wrong(numbers) == 0


def stored_side(
    case: Case, event: ComparedUnequal, at: int, writer: LastWriter | None
) -> StoredSide | None:
    """Side `at`, where `writer` is proven to have stored it and all of it is known."""
    if writer is None or not writer.gives_it or not event.is_first:
        return None
    use = next((made for made in case.launches if made.place == writer.place), None)
    return whole_side(case, event, at, use, writer.parameter) if use is not None else None


def whole_side(
    case: Case, event: ComparedUnequal, at: int, use: LaunchMade, parameter: str
) -> StoredSide | None:
    """Side `at`, where it is all of what a launch has as `parameter`, and its numbers are known."""
    side, tensor = event.sides[at], case.tensor_of(use.launch, parameter)
    if tensor is None or side.dtype not in _ROUNDING or tensor.dtype != side.dtype:
        return None
    if tensor.shape != event.shape or len(event.index) != len(tensor.strides):
        return None
    steps = sum(n * stride for n, stride in zip(event.index, tensor.strides, strict=True))
    if side.address != tensor.address + NUMPY_DTYPES[side.dtype].itemsize * steps:
        return None  # another view of it
    compared = compared_numbers(event, at, side.dtype)
    return StoredSide(use, parameter, side.dtype, compared) if compared else None


def compared_numbers(event: ComparedUnequal, at: int, dtype: str) -> ComparedNumbers | None:
    """Side `at`, which a launch has left in that type; None where not all of it is known."""
    side, other = event.sides[at], event.sides[1 - at]
    if event.rtol is None or event.atol is None or not side.allocation or side.dtype != dtype:
        return None
    one, two = _numbers(side), _numbers(other)
    if one is None or two is None or one.size != two.size:
        return None
    return ComparedNumbers(one, two, event.rtol, event.atol, at == 1)


def _numbers(side: ComparedSide) -> Array | None:
    kind = NUMPY_DTYPES.get(side.dtype)
    if not side.data or kind is None or len(side.data) % kind.itemsize:
        return None
    numbers: Array = np.frombuffer(side.data, kind).astype(np.float64)
    return numbers if np.isfinite(numbers).all() else None
