"""Every access of a replay, lane by lane, and what two replays of one launch have in common.

Counts and judges nothing else: whether a correction is right is for the doctor to say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.replay.arguments import SPACE_BITS, Argument
from hypocenter.replay.corrections import written_bytes
from hypocenter.replay.sites import kernel_frames

#: Lanes of all programs that are kept; more are only counted.
MAX_LANES = 1 << 23

Program = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class SeenAccess:
    """One access of a program: addresses of all its lanes, and which of them the mask lets through.

    `line` is the innermost line of the kernel, `operation` load, store or atomic.
    """

    operation: str
    line: int
    pointers: Array
    active: Array
    width_bytes: int


#: The program, the lines of the call chain with the operation, and the turn of the access there.
_Key = tuple[Program, tuple[object, ...], int]


class Census:
    """The accesses of one replay; `begin` and `note` are called by it, `end` when it is over."""

    def __init__(self, max_lanes: int = MAX_LANES) -> None:
        self.accesses: dict[_Key, SeenAccess] = {}
        self.programs: set[Program] = set()
        self.arguments: tuple[Argument, ...] = ()
        #: Of what was written, by argument, a digest.
        self.results: dict[str, bytes] = {}
        #: Whether all programs are kept, and not only the first ones.
        self.is_whole = True
        self._room = max_lanes
        self._program: Program = (0, 0, 0)
        self._turns: dict[object, int] = {}

    def begin(self, program: Program) -> None:
        self._program, self._turns = program, {}
        if self.is_whole:
            self.programs.add(program)

    def note(
        self, operation: str, pointers: Array, mask: Array, values: Array, width_bytes: int
    ) -> None:
        if not self.is_whole:
            return
        if self._room < pointers.size:
            self.is_whole = False
            self.programs.discard(self._program)
            return
        self._room -= pointers.size
        chain = tuple((frame.f_code.co_name, frame.f_lineno) for frame in kernel_frames())
        place = (*chain, operation)
        turn = self._turns[place] = self._turns.get(place, -1) + 1
        self.accesses[self._program, place, turn] = SeenAccess(
            operation.removesuffix("_cas"),
            chain[0][1] if chain else 0,
            pointers.reshape(-1).copy(),
            np.broadcast_to(mask, pointers.shape).reshape(-1).copy(),
            width_bytes,
        )

    def end(self, arguments: Sequence[Argument]) -> None:
        self.arguments = tuple(arguments)
        self.results = {
            argument.name: hashlib.sha256(written_bytes(argument)).digest()
            for argument in arguments
            if argument.was_written
        }

    def inside(self, access: SeenAccess) -> Array:
        """Of each lane whether it is let through and lies within the tensor that it is aimed at."""
        found = np.zeros(access.pointers.shape, bool)
        spaces = access.pointers >> np.uint64(SPACE_BITS)
        for argument in self.arguments:
            base, last = argument.address, argument.num_bytes - access.width_bytes
            aimed = spaces == np.uint64(base >> SPACE_BITS)
            if last >= 0 and aimed.any():
                offsets = access.pointers[aimed] - np.uint64(base)  # before it: wraps, so is large
                own = offsets <= np.uint64(last)
                between = argument.between(offsets.view(np.int64), access.width_bytes)
                found[aimed] = own if between is None else own & ~between
        return found & access.active

    def aims_at(self, access: SeenAccess) -> str:
        """The argument that the lanes aim at; empty for several, or none."""
        spaces = {int(space) for space in np.unique(access.pointers >> np.uint64(SPACE_BITS))}
        names = [a.name for a in self.arguments if a.address >> SPACE_BITS in spaces]
        return names[0] if len(names) == len(spaces) == 1 else ""

    def of(self, program: Program, line: int, argument: str) -> Iterator[SeenAccess]:
        """What a program does to an argument in a line, in its order."""
        for (who, _, _), access in self.accesses.items():
            if who == program and access.line == line and self.aims_at(access) == argument:
                yield access


@dataclass(frozen=True, slots=True)
class CensusChange:
    """What a second replay of a launch does otherwise than the first one.

    Lanes, of the programs that both have run: `num_gone` were outside and are no more, `num_lost`
    loads were inside and are made no more, `num_moved` are at another address. `num_unwritten`
    elements were written and are no more, whoever wrote them, and `num_unread` were read by lanes
    or programs that read no more, and now by nobody. `more_written` elements more are written than
    before. `moved` has the arguments of those lanes.
    `has_same_results`: all that was written has the same value.
    """

    num_gone: int = 0
    num_lost: int = 0
    num_moved: int = 0
    num_unwritten: int = 0
    num_unread: int = 0
    more_written: int = 0
    moved: frozenset[str] = frozenset()
    has_same_results: bool = False


def change_of(before: Census, after: Census) -> CensusChange:
    """Of programs that not both kept whole, only those that both kept count."""
    is_whole = before.is_whole and after.is_whole
    common = before.programs & after.programs
    gone = lost = moved = 0
    of_moved: set[str] = set()
    written: list[Array] = []
    read: list[Array] = []
    for key, access in before.accesses.items():
        has_run = key[0] in common
        if not has_run and not is_whole:
            continue
        again = after.accesses.get(key)
        inside = before.inside(access)
        num_outside = int(np.count_nonzero(access.active & ~inside))
        if again is None or again.pointers.shape != access.pointers.shape:
            gone += num_outside
            if access.operation != "load":
                written.append(access.pointers[inside])
            elif has_run:
                lost += int(np.count_nonzero(inside))
            else:
                read.append(access.pointers[inside])
            continue
        if _is_same(access, again) and not num_outside:
            continue
        # In a larger tensor more lies inside: what is outside of the first one counts.
        gone += max(0, num_outside - int(np.count_nonzero(again.active & ~before.inside(again))))
        now = after.inside(again)
        shifted = inside & now & (again.pointers != access.pointers)
        if shifted.any():
            moved += int(np.count_nonzero(shifted))
            of_moved.add(before.aims_at(access))
        if access.operation != "load":
            written.append(access.pointers[inside])
        else:
            lost += int(np.count_nonzero(inside & ~now))
            # The lanes behind the end of a row that is still read may lie where nobody reads.
            if access.pointers.ndim > 1 or not (inside & now).any():
                read.append(access.pointers[inside & ~now])
    return CensusChange(
        gone,
        lost,
        moved,
        _num_without(written, after, common, is_whole, is_load=False),
        _num_without(read, after, common, is_whole, is_load=True),
        _num_written(after, common, is_whole) - _num_written(before, common, is_whole),
        frozenset(of_moved),
        before.results == after.results,
    )


def _is_same(access: SeenAccess, again: SeenAccess) -> bool:
    return np.array_equal(access.active, again.active) and np.array_equal(
        access.pointers, again.pointers
    )


def _num_written(census: Census, programs: set[Program], is_whole: bool) -> int:
    """How many elements are written, each counted once."""
    found = [
        access.pointers[census.inside(access)]
        for key, access in census.accesses.items()
        if access.operation != "load" and (is_whole or key[0] in programs)
    ]
    return int(np.unique(np.concatenate([*found, _NOTHING])).size)


def _num_without(
    elements: list[Array], after: Census, programs: set[Program], is_whole: bool, *, is_load: bool
) -> int:
    """How many of these addresses no such access of `after` has."""
    if not any(part.size for part in elements):
        return 0
    now = [
        access.pointers[after.inside(access)]
        for key, access in after.accesses.items()
        if (access.operation == "load") is is_load and (is_whole or key[0] in programs)
    ]
    return int(np.setdiff1d(np.concatenate(elements), np.concatenate([*now, _NOTHING])).size)


_NOTHING = np.zeros(0, np.uint64)
