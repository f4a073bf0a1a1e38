"""What may be to blame for elements that nobody wrote: the grid, or a mask that ends too early."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from hypocenter.doctor.causes import Cause
from hypocenter.doctor.edits.bound_text import wider_conditions
from hypocenter.doctor.kernel_text import Access
from hypocenter.doctor.mask_text import accesses_at
from hypocenter.doctor.rungs.replaying.mask_causes import with_edit
from hypocenter.doctor.rungs.replaying.ranks import BOUND, SCALAR
from hypocenter.doctor.rungs.replaying.replay_cause import Allowed, ReplayCause, TextEdit
from hypocenter.doctor.rungs.replaying.trials import Bench, Seen, is_same
from hypocenter.record.events import LaunchRecord, SourceRecord, TensorRecord
from hypocenter.replay.findings import AXES, Finding

#: Programs that are tried beyond those that one more program lets one expect.
_MAX_STEPS = 3
#: Of a grid that is so much larger the replay would take too long.
_MAX_TIMES = 64


def grids(launch: LaunchRecord, argument: str) -> ReplayCause:
    """A larger grid along one axis, or along two."""
    return ReplayCause(
        Cause.GRID_TOO_SMALL,
        "",
        (),
        (),
        rank=BOUND,
        resolve=partial(_larger, launch, argument),
    )


def _larger(
    launch: LaunchRecord, argument: str, bench: Bench, finding: Finding
) -> Iterator[ReplayCause]:
    grid = tuple(launch.grid)
    one_axis = [(axis,) for axis in range(len(grid))]
    is_found = False
    for axes in (*one_axis, *itertools.combinations(range(len(grid)), 2)):
        if len(axes) > 1 and is_found:
            return
        needed = _needed_grid(bench, finding, grid, axes)
        if needed is not None:
            is_found = True
            yield _grid_cause(launch, argument, grid, needed, axes)
            for work in more_work(launch, grid[axes[0]], needed[axes[0]]):
                yield _work_cause(launch, grid, needed, work)


def _needed_grid(
    bench: Bench, finding: Finding, grid: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The least grid that is larger along these axes and leaves nothing unwritten."""
    now = _more(grid, axes, 1)
    missing = _missing(bench.replay({"grid": now}, None, False), finding)
    if missing is None:
        return None
    filled = finding.num_lanes - missing
    if filled <= 0:
        return None
    if not missing:
        return now
    if len(axes) > 1:
        return None
    least = -(-finding.num_lanes // filled)
    for more in range(least, least + _MAX_STEPS):
        if more > _MAX_TIMES * grid[axes[0]]:
            return None
        now = _more(grid, axes, more)
        if _missing(bench.replay({"grid": now}, None, False), finding) == 0:
            return now
    return None


def _more(grid: tuple[int, ...], axes: tuple[int, ...], more: int) -> tuple[int, ...]:
    return tuple(size + more * (axis in axes) for axis, size in enumerate(grid))


def _missing(seen: Seen | None, finding: Finding) -> int | None:
    """How many elements are not written."""
    if seen is None:
        return None
    return sum(found.num_lanes for found in seen.report.findings if is_same(found, finding))


@dataclass(frozen=True, slots=True)
class MoreWork:
    """A number that a launch passes, and the one with which each program may do more."""

    name: str
    was: int
    now: int

    @property
    def fix(self) -> str:
        """The correction, for people."""
        return f"Pass {self.name} = {self.now} and not {self.was}"


def more_work(launch: LaunchRecord, size: int, needed: int) -> Iterator[MoreWork]:
    """Numbers that may be what is wrong instead of the grid.

    A block that is as many times larger, or a step of so many programs.
    """
    scalars = {a.name: a.value for a in launch.arguments if a.tensor is None}
    for name, value in (scalars | launch.constants).items():
        if type(value) is not int or value < 1:
            continue
        if value == needed:
            yield MoreWork(name, value, size)
        elif needed % size == 0:
            yield MoreWork(name, value, value * (needed // size))


def rounding_text(missing: int) -> str:
    """How a number of programs comes to be one short; nothing where it lacks more."""
    return ": round up as `triton.cdiv` does" if missing == 1 else ""


def _work_cause(
    launch: LaunchRecord, grid: tuple[int, ...], needed: tuple[int, ...], work: MoreWork
) -> ReplayCause:
    file, _, line = launch.site.rpartition(":")
    return ReplayCause(
        Cause.GRID_TOO_SMALL,
        work.fix,
        (),
        ((f"{work.name} = {work.now}", lambda make: {work.name: work.now}),),
        file or None,
        int(line) if line.isdigit() else None,
        f"grid {_text(grid)}, {_text(needed)} needed",
        in_kernel=False,
        rank=BOUND,
        # Each program goes elsewhere with it: it is no less likely than a grid for that.
        allowed=Allowed(lost=True, anywhere=True),
        passed=((work.name, str(work.was), str(work.now)),),
    )


def _grid_cause(
    launch: LaunchRecord,
    argument: str,
    grid: tuple[int, ...],
    needed: tuple[int, ...],
    axes: tuple[int, ...],
) -> ReplayCause:
    file, _, line = launch.site.rpartition(":")
    said = " and ".join(f"{needed[axis]} along {AXES[axis]} and not {grid[axis]}" for axis in axes)
    missing = max(needed[axis] - grid[axis] for axis in axes)
    return ReplayCause(
        Cause.GRID_TOO_SMALL,
        f"Launch {said}{rounding_text(missing)}",
        (f"with a grid of {grid} no program writes those elements of {argument}",),
        ((f"grid {_text(needed)}", lambda make: {"grid": needed}),),
        file or None,
        int(line) if line.isdigit() else None,
        f"grid {_text(grid)}, {_text(needed)} needed",
        in_kernel=False,
        is_fix=True,
        passed=(("grid", str(grid), str(needed)),),
    )


def _text(grid: tuple[int, ...]) -> str:
    return str(grid[0]) if len(grid) == 1 else str(grid)


def wider_masks(
    launch: LaunchRecord, source: SourceRecord, access: Access, tensor: TensorRecord
) -> Iterator[ReplayCause]:
    """The mask of the store with the size of the axis as its end."""
    given = {a.name: a.value for a in launch.arguments if a.tensor is None} | launch.constants
    parameter = next((a.name for a in launch.arguments if a.tensor == tensor.id), "")
    for masked in accesses_at(source, access.line, parameter):
        for edit in wider_conditions(source, masked, given, tensor):
            yield ReplayCause(
                Cause.OUTPUT_NOT_WRITTEN,
                f"Mask the store with `{edit.now}` instead of `{edit.was}`",
                (f"the store is masked, by line {edit.line}: {edit.was}",),
                (),
                source.file,
                edit.line,
                edit.was,
                edit=TextEdit(f"`{edit.now}` in line {edit.line}", with_edit(source, edit)),
                is_fix=True,
                rank=SCALAR,
            )
