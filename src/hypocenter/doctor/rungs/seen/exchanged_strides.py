"""Two strides of a tensor that came to a kernel the other way round, inside what it may read.

The program's own comparison says so: with the two numbers exchanged the launch has to satisfy it in
every element. Whether the launch or the kernel has them the wrong way round is not proven.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from hypocenter.base.errors import HypoError
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Blame, Cause
from hypocenter.doctor.diagnosis import Claim, LastWriter, Proof, RootCause, proven
from hypocenter.doctor.kernel_text import Access, accesses
from hypocenter.doctor.rungs.seen.compared_numbers import StoredSide, stored_side
from hypocenter.record.bundle_index import LaunchMade
from hypocenter.record.compared import ComparedUnequal
from hypocenter.record.events import TensorRecord
from hypocenter.record.gap import Gap
from hypocenter.replay.terms import KernelText

NAME = "failed comparison"
#: Pairs that are tried, each by a replay, and seconds for all of them.
MAX_TRIES, SECONDS = 24, 10.0

#: Two numbers of a launch that are both strides of one of its tensors.
_Pair = tuple[tuple[str, int], tuple[str, int]]


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
        (one, first), (other, second) = pair
        after = numbers_made(case.index, place, text=text, corrections={one: second, other: first})
        if side.is_right_in(before, after):
            fitting.append(pair)
    return _claim(case, event, side, fitting[0]) if len(fitting) == 1 else None


def _pairs(case: Case, use: LaunchMade) -> Iterator[_Pair]:
    numbers = [
        (argument.name, argument.value)
        for argument in use.launch.arguments
        if argument.tensor is None
        and isinstance(argument.value, int)
        and not isinstance(argument.value, bool)
    ]
    tensors = case.tensors_of(use.launch).values()
    for one, other in itertools.combinations(numbers, 2):
        if any(_has(tensor, one, other) for tensor in tensors):
            yield one, other


def _has(tensor: TensorRecord, one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Whether two numbers are two strides of a tensor, and not the same one."""
    return one[1] != other[1] and {one[1], other[1]} <= {*tensor.strides}


def _access(case: Case, use: LaunchMade, pair: _Pair) -> tuple[Access, str] | None:
    """The one access whose address both numbers go into, and through which parameter it is."""
    source = case.sources.get(use.launch.source)
    if source is None:
        return None
    of = [accesses(source, case.parameter_of(use.launch, name), {}) for name, _ in pair]
    both = [access for access in of[0] if access in of[1]]
    names = (case.parameter_of(use.launch, name) for name in case.tensors_of(use.launch))
    found = [
        (access, name) for name in names for access in accesses(source, name, {}) if access in both
    ]
    return found[0] if len(found) == 1 else None


def _claim(case: Case, event: ComparedUnequal, side: StoredSide, pair: _Pair) -> Claim:
    (one, first), (other, second) = pair
    use, (left, right) = side.use, event.sides
    at = f"[{', '.join(map(str, event.index))}]" if event.index else ""
    exchanged = f"{one} = {second} and {other} = {first}"
    access = _access(case, use, pair)
    root = RootCause(
        cause=Cause.WRONG_STRIDE,
        sentence=f"{use.launch.kernel}: {one} = {first} and {other} = {second} came the other way "
        f"round, and {event.num_different} of {event.num_elements} elements of {side.parameter} "
        "are wrong for it; whether the launch passes them so or the kernel takes them so is not "
        "proven",
        fix=f"Exchange the two strides: pass {exchanged}, or exchange them in the kernel",
        proof=Proof(
            f"{event.compared_at}: {left.name}{at} is {left.value:.6g} and {right.name}{at} "
            f"{right.value:.6g}; the replay of {use.where} stores what was found in every element",
            exchanged,
            f"the same replay goes wrong nowhere, and each of "
            f"{count_text(event.num_elements, 'element')} satisfies the comparison; of the pairs "
            "of strides no other one does that",
        ),
        kernel=use.launch.kernel,
        argument=access[1] if access is not None else one,
        file=access[0].file if access is not None else None,
        line=access[0].line if access is not None else None,
        expression=access[0].expression if access is not None else None,
        place=use.place,
        blames=Blame.UNKNOWN,
        launched_at=use.launch.site,
    )
    refutes = "an element that fails the comparison with the two exchanged"
    return proven(root, NAME, (), refutes, use.seq)
