"""Elements that a comparison found wrong and no program reaches, and the grid that reaches them.

What a launch leaves out keeps what was there before, such as zeros. Proven where the replay stores
what was found, and not all of it, and with more programs along one axis, and along no other, it
stores all, misses no tensor, and satisfies the program's own comparison in every element.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hypocenter.base.dtypes import NUMPY_DTYPES, Array
from hypocenter.base.errors import HypoError
from hypocenter.base.wording import count_text
from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import (
    Alternative,
    Claim,
    Effect,
    LastWriter,
    Proof,
    RootCause,
    proven,
)
from hypocenter.doctor.judging.origin import writers_of
from hypocenter.doctor.rungs.replaying.unwritten_causes import MoreWork, more_work, rounding_text
from hypocenter.doctor.rungs.seen.compared_numbers import StoredSide, whole_side
from hypocenter.record.compared import ComparedUnequal
from hypocenter.record.events import Place
from hypocenter.record.gap import Gap
from hypocenter.replay.findings import AXES
from hypocenter.replay.terms import KernelText

if TYPE_CHECKING:
    from hypocenter.replay.numbers import NumbersMade

NAME = "failed comparison"
#: Grids that are tried along an axis beyond what one more program lets one expect, and how many
#: times larger one may be: its replay would take too long.
_MAX_STEPS, _MAX_TIMES = 2, 64


def claim_of_grid(
    case: Case, event: ComparedUnequal, writers: tuple[LastWriter | None, LastWriter | None]
) -> Claim | None:
    """The grid, where the last launch that may write to a side stores none of what is wrong."""
    for at, writer in enumerate(writers):
        side = _last_side(case, event, at) if writer is None else None
        if side is None:
            continue
        try:
            return _by_replay(case, event, side)
        except (HypoError, ImportError) as error:
            what = f"whether {side.use.launch.kernel} has too few programs"
            case.leave_unseen(Gap.not_examined(what, str(error)))
    return None


def _last_side(case: Case, event: ComparedUnequal, at: int) -> StoredSide | None:
    """A side as what the last launch before left that may write to it."""
    side = event.sides[at]
    before = [made for made in case.launches if made.seq < event.seq]
    if not side.allocation or not event.is_first:
        return None
    for made in writers_of(case, before, side.allocation)[:1]:
        for name in case.written_by(made.launch):
            tensor = case.tensors_of(made.launch).get(name)
            if tensor is not None and tensor.allocation == side.allocation:
                return whole_side(case, event, at, made, case.parameter_of(made.launch, name))
    return None


def _by_replay(case: Case, event: ComparedUnequal, side: StoredSide) -> Claim | None:
    from hypocenter.replay.numbers import numbers_made

    place, grid = side.use.place, tuple(side.use.launch.grid)
    if place is None:
        return None

    def replay_of(grid: tuple[int, ...]) -> NumbersMade | None:
        text = KernelText(case.allow_source)
        return numbers_made(case.index, place, text=text, corrections={"grid": grid})

    before = replay_of(grid)
    missing = _missing(side, before)
    if before is None or missing is None or not _is_found(side, before, missing):
        return None
    fitting: list[tuple[int, int]] = []
    for axis, size in enumerate(grid):
        for larger in _sizes(size, missing, _missing(side, replay_of(_with(grid, axis, size + 1)))):
            if side.is_right_in(before, replay_of(_with(grid, axis, larger))):
                fitting.append((axis, larger))
                break
    if len(fitting) != 1:
        return None
    axis, larger = fitting[0]
    works = [
        work
        for work in more_work(side.use.launch, grid[axis], larger)
        if side.is_right_in(before, _with_work(case, place, work))
    ]
    works += _starts(case, side, missing, grid[axis])
    return _claim(event, side, int(missing.sum()), (axis, larger), works)


def _starts(case: Case, side: StoredSide, missing: Array, size: int) -> list[MoreWork]:
    """Numbers with which the launch begins where an earlier one of the kernel has ended."""
    use, place = side.use, side.use.place
    tensor = case.tensor_of(use.launch, side.parameter)
    before = (made for made in case.launches if made.seq < use.seq)
    if tensor is None or place is None:
        return []
    writers = writers_of(case, list(before), tensor.allocation)
    if all(made.launch.source != use.launch.source for made in writers):
        return []
    scalars = {a.name: a.value for a in use.launch.arguments if a.tensor is None}
    found = []
    for name, value in scalars.items():
        if type(value) is not int:
            continue
        for more in (size, int((~missing).sum())):
            work = MoreWork(name, value, value + more)
            if _is_rest(side, missing, _with_work(case, place, work)):
                found.append(work)
    return found


def _is_rest(side: StoredSide, missing: Array, made: NumbersMade | None) -> bool:
    """Whether a replay stores all that was left out, and each element passes then."""
    left_out = _missing(side, made)
    if made is None or left_out is None or (left_out & missing).any():
        return False
    rows = made.results[side.parameter].rows
    numbers = rows.view(NUMPY_DTYPES[side.dtype]).astype(np.float64).reshape(-1)
    return side.compared.num_wrong(np.where(left_out, side.compared.given, numbers)) == 0


def _with_work(case: Case, place: Place, work: MoreWork) -> NumbersMade | None:
    """What the launch leaves with that number; None where the kernel cannot be run so."""
    from hypocenter.replay.numbers import numbers_made
    from hypocenter.replay.replay import KernelFailed

    text = KernelText(case.allow_source)
    with contextlib.suppress(KernelFailed):
        return numbers_made(case.index, place, text=text, corrections={work.name: work.now})
    return None


def _with(grid: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*grid[:axis], size, *grid[axis + 1 :])


def _sizes(size: int, missing: Array, with_one: Array | None) -> Iterator[int]:
    """Sizes of an axis that are worth a try, by what one more program stores."""
    num_filled = 0 if with_one is None else int(missing.sum() - with_one.sum())
    if num_filled <= 0:
        return
    least = -(-int(missing.sum()) // num_filled)
    for more in range(least, least + _MAX_STEPS):
        if size + more <= _MAX_TIMES * size:
            yield size + more


def _missing(side: StoredSide, made: NumbersMade | None) -> Array | None:
    """Of each element whether a replay did not store it; None where that is not known."""
    left = made.results.get(side.parameter) if made is not None else None
    if left is None or left.dtype != side.dtype:
        return None
    width = NUMPY_DTYPES[side.dtype].itemsize
    missing: Array = np.logical_not(left.is_written.reshape(-1, width).all(axis=1))
    return missing if missing.size == side.compared.given.size else None


def _is_found(side: StoredSide, before: NumbersMade, missing: Array) -> bool:
    """Whether some elements are not stored, and what is stored is what the program found."""
    if not missing.any() or missing.all():
        return False
    rows = before.results[side.parameter].rows
    numbers = rows.view(NUMPY_DTYPES[side.dtype]).astype(np.float64).reshape(-1)[~missing]
    given = side.compared.given
    # What is left out and right by chance holds what the wrong ones hold. Else a launch before
    # wrote it, and this one may be meant to go elsewhere.
    are_wrong = side.compared.are_wrong(given)
    by_chance = np.isin(given[missing & ~are_wrong], given[missing & are_wrong])
    return side.is_near(numbers, given[~missing]) and bool(by_chance.all())


def _claim(
    event: ComparedUnequal,
    side: StoredSide,
    num_missing: int,
    fitting: tuple[int, int],
    works: list[MoreWork],
) -> Claim:
    axis, larger = fitting
    use, launch = side.use, side.use.launch
    file, _, line = launch.site.rpartition(":")
    size = launch.grid[axis]
    programs = f"{larger} along {AXES[axis]} and not {size}"
    of_all = f"{num_missing} of {count_text(event.num_elements, 'element')} of {side.parameter}"
    fix = f"Launch {programs}{rounding_text(larger - size)}"
    fixes = (fix, *(work.fix for work in works)) if works else ()
    root = RootCause(
        cause=Cause.GRID_TOO_SMALL,
        sentence=f"{launch.kernel}: no program of the grid reaches {of_all}, which keep what was "
        f"there before: {event.num_different} are wrong for it",
        fix=fix,
        proof=Proof(
            f"{event.compared_at}: the replay of {use.where} stores no element that the comparison "
            f"found wrong, and {of_all} not at all",
            f"a grid of {programs}",
            "the same replay stores each element inside its tensor, and each satisfies the "
            "comparison; no other tensor changes",
        ),
        kernel=launch.kernel,
        argument=side.parameter,
        file=file or None,
        line=int(line) if line.isdigit() else None,
        expression=f"grid {size} along {AXES[axis]}, {larger} needed",
        place=use.place,
        launched_at=launch.site,
        alternatives=tuple(Alternative(fix=text, edits=(), effect=Effect()) for text in fixes),
    )
    refutes = "an element that fails the comparison with that grid"
    return proven(root, NAME, (), refutes, use.seq)
