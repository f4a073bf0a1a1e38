"""Two strides of a tensor that came to a kernel the other way round, inside what it may read.

The program's own comparison finds the pair: with the two exchanged each element has to satisfy it.
That may be wrong by itself, so it proves nothing alone. What does is which elements the kernel
touches: some of them never as launched, and all of them equally often with the two exchanged.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.errors import HypoError
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, LastWriter, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.edits.factor_text import factors_at
from hypocenter.doctor.kernel_text import Access, accesses
from hypocenter.doctor.rungs.seen.compared_numbers import StoredSide, stored_side
from hypocenter.doctor.rungs.seen.touched import touches_of
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.compared import ComparedUnequal
from hypocenter.record.events import TensorRecord
from hypocenter.record.gap import Gap
from hypocenter.replay.terms import KernelText

NAME = "failed comparison"
#: Pairs that are tried, each by a replay, and seconds for all of them.
MAX_TRIES, SECONDS = 24, 10.0
#: Elements that are counted.
_MAX_COUNTED = 1 << 20


#: Two numbers of a launch, by the names under which they were passed.
_Pair = tuple[tuple[str, int], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Strided:
    """A tensor that a kernel touches in one access, of whose address both of a pair are factors."""

    parameter: str
    tensor: TensorRecord
    access: Access


def claim_of_exchanged(
    case: Case, event: ComparedUnequal, writers: tuple[LastWriter | None, LastWriter | None]
) -> Claim | None:
    """The pair, where it is the only one with which every element passes."""
    for at, writer in enumerate(writers):
        side = stored_side(case, event, at, writer)
        if side is None:
            continue
        try:
            return _by_replay(case, event, side)
        except (HypoError, ImportError) as error:
            what = f"strides of {side.use.launch.kernel} the other way round"
            case.leave_unseen(Gap.not_examined(what, str(error)))
    return None


def _by_replay(case: Case, event: ComparedUnequal, side: StoredSide) -> Claim | None:
    from hypocenter.replay.numbers import numbers_made

    pairs, place = list(_pairs(case, side.use)), side.use.place
    if not pairs or len(pairs) > MAX_TRIES or place is None:
        return None
    text, stop = KernelText(case.allow_source), case.limit.until(SECONDS)
    before = numbers_made(case.index, place, text=text)
    if before is None or not side.is_found_by(before):
        return None
    fitting: list[_Pair] = []
    for pair in pairs:
        if time.monotonic() > stop:  # of those that are left one may fit as well
            return None
        after = numbers_made(case.index, place, text=text, corrections=_exchanged_numbers(pair))
        if side.is_right_in(before, after):
            fitting.append(pair)
    strided = list(_strided_tensors(case, side.use, fitting[0])) if len(fitting) == 1 else []
    if len(strided) != 1:
        return None
    untouched = _num_untouched(case, side.use, strided[0], fitting[0])
    if not untouched:
        return _unproven(event, side, strided[0], fitting[0])
    return _claim(event, side, strided[0], fitting[0], untouched)


def _exchanged_numbers(pair: _Pair) -> dict[str, int]:
    (one, first), (other, second) = pair
    return {one: second, other: first}


def _pairs(case: Case, use: LaunchMade) -> Iterator[_Pair]:
    """Any two that equal two strides of a tensor: each of them may explain what was found."""
    numbers = [
        (argument.name, argument.value)
        for argument in use.launch.arguments
        if argument.tensor is None and type(argument.value) is int
    ]
    tensors = case.tensors_of(use.launch).values()
    for one, other in itertools.combinations(numbers, 2):
        if one[1] != other[1] and any({one[1], other[1]} <= {*of.strides} for of in tensors):
            yield one, other


def _strided_tensors(case: Case, use: LaunchMade, pair: _Pair) -> Iterator[_Strided]:
    """The tensors that have both strides and whose address both numbers are factors of.

    None of a tensor of several accesses, which are not told apart.
    """
    source = case.sources.get(use.launch.source)
    if source is None:
        return
    names = {case.parameter_of(use.launch, name) for name, _ in pair}
    for name, tensor in case.tensors_of(use.launch).items():
        parameter = case.parameter_of(use.launch, name)
        through = accesses(source, parameter, {})
        if len(through) != 1 or not {number for _, number in pair} <= {*tensor.strides}:
            continue
        factors = {factor.name for factor in factors_at(source, through[0].line, parameter)}
        if names <= factors:
            yield _Strided(parameter, tensor, through[0])


def _num_untouched(case: Case, use: LaunchMade, of: _Strided, pair: _Pair) -> int:
    """Elements of the tensor that the launch never touches, where it touches each equally often
    with the two numbers exchanged; 0 else."""
    shape, strides = of.tensor.shape, of.tensor.strides
    if math.prod(shape) > _MAX_COUNTED:
        return 0
    steps = (np.arange(size) * by for size, by in zip(shape, strides, strict=True))
    elements = np.unique(sum(np.ix_(*steps), start=np.zeros((), np.int64)))
    before, after = (
        _touched_elements(case, use, of.parameter, given)
        for given in ({}, _exchanged_numbers(pair))
    )
    if before is None or after is None:
        return 0
    (was, times_before), (now, times) = before, after
    if not np.array_equal(now, elements) or len(np.unique(times)) != 1:
        return 0
    if times_before.sum() != times.sum():  # a mask hangs on them as well
        return 0
    return int(np.setdiff1d(elements, was).size)


def _touched_elements(
    case: Case, use: LaunchMade, parameter: str, given: dict[str, int]
) -> tuple[Array, Array] | None:
    """Elements from the tensor's start that a whole replay touches, and how often each."""
    found = touches_of(case, use, parameter, given)
    if found is None:
        return None
    return np.unique(found.offsets // found.item_bytes, return_counts=True)


def _comparison_text(event: ComparedUnequal, side: StoredSide) -> str:
    left, right = event.sides
    at = f"[{', '.join(map(str, event.index))}]" if event.index else ""
    return (
        f"{event.compared_at}: {left.name}{at} is {left.value:.6g} and {right.name}{at} "
        f"{right.value:.6g}; the replay of {side.use.where} stores what was found in every element"
    )


def _text_of(numbers: dict[str, int]) -> str:
    return " and ".join(f"{name} = {value}" for name, value in numbers.items())


def _unproven(event: ComparedUnequal, side: StoredSide, of: _Strided, pair: _Pair) -> Claim:
    """The comparison alone: it may be the one that has the two the wrong way round."""
    kernel = side.use.launch.kernel
    return row(
        Cause.WRONG_STRIDE,
        Verdict.INCONCLUSIVE,
        NAME,
        _comparison_text(event, side),
        f"with {_text_of(_exchanged_numbers(pair))} instead of {_text_of(dict(pair))} each element "
        "satisfies the comparison; whether that or the launch is wrong does not follow from the "
        f"elements of {of.parameter} that are touched",
        would_refute=f"that {kernel} is meant to go through {of.parameter} so",
        kernel=kernel,
        argument=of.parameter,
    )


def _claim(
    event: ComparedUnequal, side: StoredSide, of: _Strided, pair: _Pair, untouched: int
) -> Claim:
    use, right, access = side.use, _text_of(_exchanged_numbers(pair)), of.access
    part = f"{untouched} of {math.prod(of.tensor.shape)} elements of {of.parameter}"
    root = RootCause(
        cause=Cause.WRONG_STRIDE,
        sentence=f"{use.launch.kernel}: {_text_of(dict(pair))} came the other way round, so that "
        f"{part} are never touched, and {event.num_different} of {event.num_elements} elements of "
        f"{side.parameter} are wrong for it; whether the launch passes them so or the kernel takes "
        "them so is not proven",
        fix=f"Exchange the two strides: pass {right}, or exchange them in the kernel",
        proof=Proof(
            f"{_comparison_text(event, side)}; {part}, whose strides are "
            f"{tuple(of.tensor.strides)}, are never touched, and others more often instead",
            right,
            f"the same replay goes wrong nowhere and touches each element of {of.parameter} "
            f"equally often, and each of {count_text(event.num_elements, 'element')} satisfies the "
            "comparison; of the pairs of strides no other one does that",
        ),
        kernel=use.launch.kernel,
        argument=of.parameter,
        file=access.file,
        line=access.line,
        expression=access.expression,
        place=use.place,
        blames=Blame.UNKNOWN,
        launched_at=use.launch.site,
    )
    refutes = (
        "an element that fails the comparison with the two exchanged, or one of the tensor that is "
        "touched more often than another then"
    )
    return proven(root, NAME, (), refutes, use.seq)
