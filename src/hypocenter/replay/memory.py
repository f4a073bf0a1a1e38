"""The memory of a replay: gives each argument addresses of its own and checks every access.

Keeps what each program wrote and read, so that races and uninitialised reads show. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device.interpret.builder import Exact
from hypocenter.device.interpret.interpret import block_of_others
from hypocenter.replay.arguments import MANY, SPACE_BITS, Argument
from hypocenter.replay.findings import OVERFLOWS, Finding, FindingKind, races_once
from hypocenter.replay.lanes import Lanes
from hypocenter.replay.sites import (
    FrameMoment,
    address_is_loaded,
    adds_to_loaded,
    kernel_frames,
    moment_of,
    pointers_at,
    site_of,
    state_of,
    values_at,
    wrap_site,
)
from hypocenter.replay.waiting import Polls
from hypocenter.replay.wrapped import are_inside, are_wrapped

#: What is wrong at a lane, in words; its index in the tensor; its element number from the first.
_Place = tuple[str, tuple[int, ...] | None, int | None]


def _outside(argument: Argument, offset: int) -> _Place:
    return argument.place(offset), None, offset // argument.item_bytes


def _too_wide(argument: Argument, offset: int, width: int) -> _Place:
    text = f"{width} bytes at a time, but its elements have {argument.item_bytes}: "
    return text + argument.place(offset), None, offset // argument.item_bytes


def _some(addresses: Array) -> list[int]:
    """The least and the largest address, and one between them in order."""
    ordered = np.sort(addresses)
    return [int(ordered[at]) for at in (0, ordered.size // 2, -1)]


def _bits(values: Array) -> Any:
    """The type that holds the bits of a number, so that NaN is like itself."""
    return np.dtype(f"u{values.dtype.itemsize}")


@dataclass(slots=True)
class _Found:
    finding: Finding  # of the lowest program that has it
    program: tuple[int, int, int]
    num_lanes: int = 0
    programs: set[tuple[int, int, int]] = field(default_factory=set)


@dataclass(slots=True)
class _Hit:
    """Lanes of one access that lie inside one argument: byte offsets, and flat lane numbers."""

    argument: Argument
    offsets: Array
    lanes: Array | None  # None: all lanes, in order


@dataclass(eq=False, slots=True)
class LeftOut:
    """A load without `other` of one program, and the lanes that its mask left out at first."""

    frames: list[FrameMoment]
    shape: tuple[int, ...]
    lanes: Array
    argument: Argument | None
    is_told: bool = False


class CheckedMemory:
    """The Memory of an interpretation that checks each access and keeps Findings."""

    def __init__(
        self,
        kernel: str,
        native: Any,
        find: Callable[[int], Argument | None] = lambda address: None,
    ) -> None:
        """`find` gives the tensor at a real address, for kernels that read tables of pointers."""
        self.exact: Exact | None = None
        self.kernel = kernel
        self.num_lanes = 0
        #: Called with operation, addresses and values of each access, while somebody wants that.
        self.on_access: Callable[[str, Array, Array], None] | None = None
        #: Called with operation, addresses, mask and values of each, and the width of an element.
        self.on_lanes: Callable[[str, Array, Array, Array, int], None] | None = None
        #: Called when a program waits for a word, with whether it got on since it last did.
        self.on_wait: Callable[[bool], None] | None = None
        self._polls = Polls()
        #: Told of program, operation, operands and result where that is not finite.
        self.on_numbers: Callable[..., Array | None] | None = None
        self._native = native
        self._arguments: dict[int, Argument] = {}
        self._tables: list[Argument] = []
        self._find = find
        self._found: dict[Any, _Found] = {}
        self._program = (0, 0, 0)
        self._epochs: list[tuple[int, int, int]] = [(-1, -1, -1)]
        self._epoch = 0
        self._visible = np.zeros(1024, bool)
        self._seen: set[int] = set()
        self._has_synchronised = False
        self._released: dict[tuple[int, int], set[int]] = {}
        self._left_out: dict[Any, LeftOut] = {}
        self.lanes = Lanes()

    # -- what a replay tells it -----------------------------------------------------------------

    def add(self, argument: Argument) -> None:
        self._arguments[argument.number] = argument

    def begin(self, program: tuple[int, int, int]) -> None:
        """The accesses that follow are `program`'s."""
        self._program = program
        self._left_out = {}
        self._polls = Polls()
        self.meet()
        self._visible[list(self._seen)] = False
        self._seen = set()
        self._has_synchronised = False
        self._next_epoch()

    def suspend(self) -> object:
        """What belongs to the program that is running; `resume` goes on with it."""
        own = self._program, self._epoch, self._seen, self._has_synchronised
        return *own, self._left_out, self._polls

    def resume(self, kept: Any) -> None:
        self._visible[list(self._seen)] = False
        self._program, self._epoch, self._seen, self._has_synchronised, *rest = kept
        self._left_out, self._polls = rest
        self._see(set())
        self._visible[list(self._seen)] = True
        self.meet()

    def note_waiting(self, num_ended: int, num_waiting: int) -> bool:
        """The program that waits does so for ever: a finding, if this launch changes that memory.

        Otherwise somebody else may be meant to, another launch or the host: False.
        """
        operation, address = self._polls.place
        argument = self._arguments.get(address >> SPACE_BITS)
        if argument is None or not argument.region.is_changed:
            return False
        offset = address - argument.address
        text = (
            f"waits for {argument.place(offset)} to change, and no program is left that does it: "
            f"{num_ended} have ended, and {num_waiting} wait"
        )
        self.report(
            FindingKind.WAITS_FOR_EVER,
            operation,
            argument,
            (),
            np.zeros(1, np.int64),
            lambda i: (text, argument.element(offset), offset // argument.item_bytes),
        )
        return True

    def see_numbers(
        self, operation: str, operands: tuple[Array, ...], result: Array
    ) -> Array | None:
        """A result of the program that runs is not finite; what is to stand in its place."""
        assert self.on_numbers is not None
        return self.on_numbers(self._program, operation, operands, result)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return (*self._arguments.values(), *self._tables)

    def findings(self) -> tuple[Finding, ...]:
        """All findings, each with the number of its lanes and programs."""
        return races_once(
            [
                msgspec.structs.replace(
                    found.finding, num_lanes=found.num_lanes, num_programs=len(found.programs)
                )
                for found in self._found.values()
            ]
        )

    def _next_epoch(self) -> None:
        """What a program does between two atomics is one epoch; races are between epochs."""
        self._epoch = len(self._epochs)
        self._epochs.append(self._program)
        if self._epoch + 1 >= len(self._visible):
            self._visible[MANY] = False
            self._visible = np.concatenate([self._visible, np.zeros_like(self._visible)])
        self._see({self._epoch})

    def _see(self, epochs: set[int]) -> None:
        self._seen |= epochs
        self._visible[list(epochs)] = True
        self._visible[0] = True
        # Which of several it was is lost, so a program that has synchronised with any gets the
        # benefit of the doubt.
        self._visible[MANY] = self._has_synchronised

    # -- findings -------------------------------------------------------------------------------

    def report(
        self,
        kind: FindingKind,
        operation: str,
        argument: Argument | None,
        shape: tuple[int, ...],
        lanes: Array,
        describe: Callable[[int], _Place],
        frames: Sequence[FrameMoment] | None = None,
        **more: Any,
    ) -> None:
        """Note a fault of `lanes` (flat numbers); `describe(i)` tells of the i-th of them.

        The lowest program that has it is the one that is shown, in whatever order they are run.
        `frames` are those of the kernel at that access, where it was made earlier.
        """
        frames = kernel_frames() if frames is None else frames
        name = argument.name if argument else None
        of_lanes = more.get("is_of_lanes", False)
        key = (kind, of_lanes, name, tuple((f.f_code, f.f_lasti) for f in frames))
        found = self._found.get(key)
        if found is None or self._program[::-1] < found.program[::-1]:
            sites = tuple(site_of(frame) for frame in frames)
            lane = tuple(int(x) for x in np.unravel_index(int(lanes[0]), shape)) if shape else ()
            detail, element, number = describe(0)
            values = values_at(frames[0], sites[0].expression, lane, shape) if frames else {}
            finding = Finding(
                kind=kind,
                kernel=self.kernel,
                operation=operation,
                detail=detail,
                argument=name,
                element=element,
                number=number,
                program=self._program,
                lane=lane,
                sites=sites,
                values=values,
                layout=argument.layout if argument else None,
                **more,
            )
            if found is None:
                self._found[key] = _Found(finding, self._program)
            else:
                found.finding, found.program = finding, self._program
        self._found[key].num_lanes += len(lanes)
        self._found[key].programs.add(self._program)

    # -- addresses ------------------------------------------------------------------------------

    def _hits(self, operation: str, pointers: Array, mask: Array, width: int) -> Iterator[_Hit]:
        """The lanes that may go on, by argument; the others are reported."""
        shape = pointers.shape
        flat = pointers.reshape(-1)
        active = np.broadcast_to(mask, shape).reshape(-1)
        lanes: Array | None = None
        if operation == "store" and flat.size:
            aimed = self._arguments.get(int(flat[0]) >> SPACE_BITS)
            if aimed is not None:
                aimed.store_seen = True
        if not active.all():
            lanes = np.flatnonzero(active)
            flat = flat[lanes]
        if self.exact is not None:
            flat, lanes = self._without_wrapped(operation, pointers, flat, lanes, width)
        self.num_lanes += flat.size
        if not flat.size:
            return
        low, high = int(flat.min()), int(flat.max())
        if low >> SPACE_BITS == high >> SPACE_BITS:
            yield from self._inside(operation, shape, flat, lanes, width, low, high)
            return
        spaces = flat >> np.uint64(SPACE_BITS)
        numbers = np.arange(flat.size) if lanes is None else lanes
        for space in np.unique(spaces):
            some = spaces == space
            part = flat[some]
            low, high = int(part.min()), int(part.max())
            yield from self._inside(operation, shape, part, numbers[some], width, low, high)

    def _without_wrapped(
        self, operation: str, pointers: Array, flat: Array, lanes: Array | None, width: int
    ) -> tuple[Array, Array]:
        assert self.exact is not None
        wrap = self.exact.wrap
        exact = np.broadcast_to(self.exact.values, pointers.shape).reshape(-1)
        numbers = np.arange(flat.size) if lanes is None else lanes
        exact = exact[numbers]
        bad = are_wrapped(flat, exact, self.exact.reduced, self._arguments, width)
        if bad.any():
            origin = wrap_site(wrap)
            argument = self._arguments.get(int(exact[bad][0]) >> SPACE_BITS)
            meant = exact[bad].astype(np.uint64, copy=False)
            meant_inside = are_inside(meant, self._arguments, width)

            def describe(i: int) -> _Place:
                base = argument.address if argument else 0
                right, wrong = int(exact[bad][i]) - base, int(flat[bad][i]) - base
                text = f"{origin.expression} left {wrap.type_name}: byte offset {wrong} instead of"
                width = argument.item_bytes if argument else 1
                outside = "" if meant_inside[i] else ", which is outside as well"
                return f"{text} {right}{outside}", None, wrong // width

            shape = pointers.shape
            self.report(
                OVERFLOWS[wrap.type_name],
                operation,
                argument,
                shape,
                numbers[bad],
                describe,
                origin=origin,
                is_meant_inside=bool(meant_inside.any()),
            )
        return flat[~bad], numbers[~bad]

    def _inside(
        self,
        operation: str,
        shape: tuple[int, ...],
        flat: Array,
        lanes: Array | None,
        width: int,
        low: int,
        high: int,
    ) -> Iterator[_Hit]:
        argument = self._arguments.get(low >> SPACE_BITS)
        if argument is None:
            numbers = np.arange(flat.size) if lanes is None else lanes
            yield from self._through_table(operation, shape, flat, numbers, width)
            return
        base = argument.address
        offsets = (flat - np.uint64(base)).view(np.int64)
        if argument.keeps_width and width != argument.item_bytes:
            numbers = np.arange(flat.size) if lanes is None else lanes
            self.report(
                FindingKind.ELEMENT_WIDTH,
                operation,
                argument,
                shape,
                numbers,
                lambda i: _too_wide(argument, int(offsets[i]), width),
                width_bytes=width,
            )
        if low < base or high - base > argument.num_bytes - width:
            bad = (offsets < 0) | (offsets > argument.num_bytes - width)
            numbers = np.arange(flat.size) if lanes is None else lanes
            outside = offsets[bad]
            # torch gives an empty tensor the address 0.
            is_null = argument.region.data is not None and not argument.region.data.size
            self.report(
                FindingKind.NULL_POINTER if is_null else FindingKind.OUT_OF_BOUNDS,
                operation,
                argument,
                shape,
                numbers[bad],
                lambda i: _outside(argument, int(outside[i])),
            )
            offsets, lanes = offsets[~bad], numbers[~bad]
        if (gone := argument.between(offsets, width)) is not None:
            numbers = np.arange(flat.size) if lanes is None else lanes
            astray = offsets[gone]
            self.report(
                FindingKind.BETWEEN_ROWS,
                operation,
                argument,
                shape,
                numbers[gone],
                lambda i: _outside(argument, int(astray[i])),
            )
            offsets, lanes = offsets[~gone], numbers[~gone]
        if offsets.size:
            yield _Hit(argument, offsets, lanes)

    def _through_table(
        self, operation: str, shape: tuple[int, ...], flat: Array, numbers: Array, width: int
    ) -> Iterator[_Hit]:
        """Addresses of no argument: those of a tensor that a table of pointers names, or wild.

        What lies in no tensor, where all others of the access lie in one, leaves that one.
        """
        beside = {
            argument.address: argument for argument in map(self._lookup, _some(flat)) if argument
        }
        only = next(iter(beside.values())) if len(beside) == 1 else None
        while flat.size:
            address = int(flat[0])
            argument = self._lookup(address)
            is_null = not address >> SPACE_BITS
            if (
                argument is None
                and not is_null
                and (aimed := only or self._argument_aimed_at()) is not None
            ):
                # So far off that the address says nothing of the tensor that it was meant for.
                far = (flat - np.uint64(aimed.address)).view(np.int64)
                gone = (far < 0) | (far > aimed.num_bytes - width)
                astray = far[gone]
                self.report(
                    FindingKind.OUT_OF_BOUNDS,
                    operation,
                    aimed,
                    shape,
                    numbers[gone],
                    lambda i, aimed=aimed, astray=astray: _outside(aimed, int(astray[i])),  # type: ignore[misc]
                )
                if not gone.all():
                    yield _Hit(aimed, far[~gone], numbers[~gone])
                return
            if argument is None:
                same = flat >> np.uint64(SPACE_BITS) == address >> SPACE_BITS
                detail = f"address {address:#x} belongs to no tensor", None, None
                self.report(
                    FindingKind.NULL_POINTER if is_null else FindingKind.WILD_POINTER,
                    operation,
                    None,
                    shape,
                    numbers[same],
                    lambda i, detail=detail: detail,  # type: ignore[misc]
                )
            else:
                offsets = (flat - np.uint64(argument.address)).view(np.int64)
                same = (offsets >= 0) & (offsets <= argument.num_bytes - width)
                same[0] = True
                if int(offsets[0]) <= argument.num_bytes - width:
                    yield _Hit(argument, offsets[same], numbers[same])
            flat, numbers = flat[~same], numbers[~same]

    def _argument_aimed_at(self) -> Argument | None:
        """The tensor whose pointer stands in the access that is being made; None for several."""
        frames = kernel_frames()
        if not frames:
            return None
        held = pointers_at(frames[0], site_of(frames[0]).expression)
        found = [self._arguments.get(address >> SPACE_BITS) for address in held]
        aimed = {argument.number: argument for argument in found if argument is not None}
        return next(iter(aimed.values())) if len(aimed) == 1 else None

    def _lookup(self, address: int) -> Argument | None:
        for argument in self._tables:
            if argument.address <= address < argument.address + argument.num_bytes:
                return argument
        found = self._find(address)
        if found is not None:
            self._tables.append(found)
        return found

    def meet(self) -> None:
        """All lanes of the program meet (`undefined.Watch`)."""
        self.lanes.meet()

    # -- lanes without a value ------------------------------------------------------------------

    def left_out(self, pointers: Array, lanes: Array) -> LeftOut:
        """A load without `other` that is being made leaves `lanes` out (`undefined.Watch`)."""
        frames = kernel_frames()
        key = tuple((frame.f_code, frame.f_lasti) for frame in frames)
        if key not in self._left_out:
            moments = [moment_of(frame) for frame in frames]
            aimed = self._arguments.get(int(pointers.reshape(-1)[0]) >> SPACE_BITS)
            numbers = np.flatnonzero(lanes)
            self._left_out[key] = LeftOut(moments, pointers.shape, numbers, aimed)
        return self._left_out[key]

    def tell_reached(self, load: LeftOut, what: str) -> None:
        """A lane that `load` left out reaches `what` of the instruction that is being run."""
        if load.is_told:
            return
        load.is_told = True
        here, there = site_of(kernel_frames()[0]), site_of(load.frames[0])
        line = f"line {here.line}" if here.file == there.file else f"{here.file}:{here.line}"
        detail = (
            "the mask leaves this lane out, and a load without `other` gives it no value; that "
            f"reaches {what} in {line}: {here.expression}"
        )
        self.report(
            FindingKind.UNDEFINED_LANE,
            "load",
            load.argument,
            load.shape,
            load.lanes,
            lambda i: (detail, None, None),
            load.frames,
        )

    # -- who wrote, who read --------------------------------------------------------------------

    def _track_read(self, hit: _Hit, operation: str, shape: tuple[int, ...], width: int) -> None:
        argument, region = hit.argument, hit.argument.region
        argument.was_read = True
        if region.data is None:
            return
        first = hit.offsets + argument.start if argument.start else hit.offsets
        if region.init is not None:
            bad = ~region.init[first]
            for byte in range(region.granule, width, region.granule):
                bad |= ~region.init[first + byte]
            self._lanes_report(FindingKind.UNINITIALISED_READ, operation, hit, shape, bad, None)
        granules = first // region.granule if region.granule > 1 else first
        if region.is_written:
            writers = region.writer[granules]
            bad = ~self._visible[writers]
            self._lanes_report(
                FindingKind.RACE,
                operation,
                hit,
                shape,
                bad,
                (writers, "reads what", "wrote"),
                has_read=True,
            )
        if (clash := self.lanes.clash(region, granules, hit.lanes)) is not None:
            self._lanes_report(
                FindingKind.RACE,
                operation,
                hit,
                shape,
                clash,
                "reads what another lane of this program has stored, with no barrier between",
                is_of_lanes=True,
            )
        readers = region.reader[granules]
        mine = (readers == 0) | (readers == self._epoch)
        region.reader[granules] = np.where(mine, self._epoch, MANY)

    def _track_write(
        self, hit: _Hit, operation: str, shape: tuple[int, ...], width: int, values: Array | None
    ) -> None:
        """`values` None: an atomic, which races with nothing but plain accesses."""
        argument, region = hit.argument, hit.argument.region
        argument.was_written = True
        if region.data is None:
            return
        first = hit.offsets + argument.start if argument.start else hit.offsets
        granules = first // region.granule if region.granule > 1 else first
        if values is not None:
            writers = region.writer[granules]
            overwrites = ~self._visible[writers]
            if overwrites.any() and values.dtype.kind in "iub":
                # A flag that several programs raise is the same one in whatever order. A zero may
                # come of contents that nobody recorded, and floats of sums that lose parts.
                raised = values[overwrites]
                held = argument.read(hit.offsets[overwrites], values.dtype)
                overwrites[overwrites] = (held != raised) | (raised == 0)
            self._lanes_report(
                FindingKind.RACE,
                operation,
                hit,
                shape,
                overwrites,
                (writers, "writes what", "wrote"),
            )
            readers = region.reader[granules]
            bad = ~self._visible[readers] & ~overwrites  # a lane counts once
            self._lanes_report(
                FindingKind.RACE,
                operation,
                hit,
                shape,
                bad,
                (readers, "writes what", "read"),
                has_read=True,
            )
            self._track_lanes(hit, shape, granules, values)
            region.writer[granules] = self._epoch
            region.is_changed = True
        else:
            writers = region.writer[granules]
            alone = (writers == 0) | self._visible[writers]
            region.writer[granules] = np.where(alone, self._epoch, MANY)
        region.is_written = True
        if region.init is not None:
            for byte in range(width):
                region.init[first + byte] = True
        for extra in range(1, width // region.granule):
            region.writer[granules + extra] = self._epoch

    def _track_lanes(
        self, hit: _Hit, shape: tuple[int, ...], granules: Array, values: Array
    ) -> None:
        """Two lanes of a program that store different values to one place: either may win."""
        region = hit.argument.region
        if (clash := self.lanes.clash(region, granules, hit.lanes)) is not None:
            differ = clash.copy()
            before = hit.argument.read(hit.offsets[clash], values.dtype)
            differ[clash] = before.view(_bits(values)) != values[clash].view(_bits(values))
            told = "stores another value than another lane of this program has, with no barrier "
            self._lanes_report(
                FindingKind.RACE, "store", hit, shape, differ, f"{told}between", is_of_lanes=True
            )
        twice = None
        if granules.size > 1 and not (np.diff(granules) > 0).all():
            order = np.argsort(granules, kind="stable")
            sorted_granules, sorted_values = granules[order], values[order]
            same = sorted_granules[1:] == sorted_granules[:-1]
            bad = np.zeros(granules.size, bool)
            bad[order[1:][same & (sorted_values[1:] != sorted_values[:-1])]] = True
            told = "two lanes of one store write different values"
            self._lanes_report(FindingKind.RACE, "store", hit, shape, bad, told, is_of_lanes=True)
            twice = sorted_granules[1:][same]
            self._track_lost(hit, shape, values, order[1:][same & ~bad[order[1:]]])
        self.lanes.store(region, granules, hit.lanes, twice)

    def _track_lost(self, hit: _Hit, shape: tuple[int, ...], values: Array, again: Array) -> None:
        """Lanes `again` store what another lane stores there too: a sum of both has lost a part."""
        if not again.size:
            return
        lost = np.zeros(values.size, bool)
        lost[again] = hit.argument.read(hit.offsets[again], values.dtype) != values[again]
        if lost.any() and adds_to_loaded(kernel_frames()):
            told = "two lanes of one store add to one element, and one of the additions is lost"
            more = {"is_of_lanes": True, "has_read": True}
            self._lanes_report(FindingKind.RACE, "store", hit, shape, lost, told, **more)

    def _lanes_report(
        self,
        kind: FindingKind,
        operation: str,
        hit: _Hit,
        shape: tuple[int, ...],
        bad: Array,
        others: tuple[Array, str, str] | str | None,
        **more: Any,
    ) -> None:
        if not bad.any():
            return
        numbers = np.flatnonzero(bad)
        argument = hit.argument

        def describe(i: int) -> _Place:
            offset = int(hit.offsets[numbers[i]])
            place = argument.place(offset)
            if isinstance(others, str):
                place = f"{others}: {place}"
            elif others is not None:
                epochs, before, after = others
                who = int(epochs[numbers[i]])
                name = f"program {self._epochs[who]}" if who > 0 else "several programs"
                place = f"{before} {name} {after}: {place}"
            elif kind is FindingKind.UNINITIALISED_READ:
                place = f"nobody has written {place}"
            return place, argument.element(offset), offset // argument.item_bytes

        lanes = numbers if hit.lanes is None else hit.lanes[numbers]
        self.report(kind, operation, argument, shape, lanes, describe, **more)

    # -- the four accesses ----------------------------------------------------------------------

    def load(self, pointers: Array, mask: Array, other: Array, dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        loaded = block_of_others(other, pointers.shape, dtype)
        flat = loaded.reshape(-1)
        for hit in self._hits("load", pointers, mask, dtype.itemsize):
            self._track_read(hit, "load", pointers.shape, dtype.itemsize)
            values = hit.argument.read(hit.offsets, dtype)
            if hit.lanes is None:
                flat[:] = values
            else:
                flat[hit.lanes] = values
        self._note("load", pointers, mask, loaded)
        return loaded

    def store(self, pointers: Array, values: Array, mask: Array) -> None:
        width = values.dtype.itemsize
        flat = np.broadcast_to(values, pointers.shape).reshape(-1)
        for hit in self._hits("store", pointers, mask, width):
            if hit.argument.region.init is not None and not hit.argument.is_scattered:
                hit.argument.is_scattered = address_is_loaded(kernel_frames())
            stored = flat if hit.lanes is None else flat[hit.lanes]
            self._track_write(hit, "store", pointers.shape, width, stored)
            hit.argument.write(hit.offsets, stored)
        self._note("store", pointers, mask, flat)

    def atomic_rmw(
        self, operation: Any, pointers: Array, values: Array, mask: Array, order: Any
    ) -> Array:
        real, allowed = self._atomic("atomic", pointers, mask, values.dtype.itemsize)
        result: Array = self._native.atomic_rmw(operation, real, values, allowed, order)
        self._note_change(pointers, result, allowed)
        self._note("atomic", pointers, mask, result)
        return result

    def atomic_cas(self, pointers: Array, compare: Array, values: Array, order: Any) -> Array:
        every = np.ones(pointers.shape, bool)
        real, allowed = self._atomic("atomic_cas", pointers, every, values.dtype.itemsize)
        # It has no mask: a lane that may not go on works on a scratch word of its own.
        scratch = np.zeros(pointers.size, np.uint64)
        flat, allowed = real.reshape(-1), allowed.reshape(-1)
        spare = scratch.ctypes.data + np.arange(pointers.size, dtype=np.uint64) * np.uint64(8)
        flat[~allowed] = spare[~allowed]
        result: Array = self._native.atomic_cas(real, compare, values, order)
        self._note_change(pointers, result, allowed)
        self._note("atomic_cas", pointers, every, result)
        return result

    def _note(self, operation: str, pointers: Array, mask: Array, values: Array) -> None:
        if self.on_wait is not None and self._polls.note(operation, pointers, values):
            self.on_wait(self._polls.has_moved(state_of(kernel_frames())))
        if self.on_access is not None:
            self.on_access(operation, pointers, values)
        if self.on_lanes is not None:
            self.on_lanes(operation, pointers, mask, values, values.dtype.itemsize)

    def _note_change(self, pointers: Array, before: Array, allowed: Array) -> None:
        """Whether an atomic of one word has left another number there than it found."""
        argument = self._arguments.get(int(pointers.reshape(-1)[0]) >> SPACE_BITS)
        if argument is None or argument.region.is_changed or not allowed.any():
            return
        offsets = (pointers.reshape(-1) - np.uint64(argument.address)).view(np.int64)
        now = argument.read(offsets[:1], before.dtype) if before.size == 1 else None
        argument.region.is_changed = now is None or bool(now[0] != before.reshape(-1)[0])

    def _atomic(
        self, operation: str, pointers: Array, mask: Array, width: int
    ) -> tuple[Array, Array]:
        """Real addresses for the native atomics, and which lanes have one."""
        real = np.zeros(pointers.shape, np.uint64)
        allowed = np.zeros(pointers.shape, bool)
        for hit in self._hits(operation, pointers, mask, width):
            region = hit.argument.region
            self._track_uninitialised(hit, operation, pointers.shape)
            self._track_write(hit, operation, pointers.shape, width, None)
            hit.argument.was_updated = True
            lanes = slice(None) if hit.lanes is None else hit.lanes
            if region.data is None:
                continue
            start = region.data.ctypes.data + hit.argument.start
            real.reshape(-1)[lanes] = hit.offsets.astype(np.uint64) + np.uint64(start)
            allowed.reshape(-1)[lanes] = True
            self.meet()
            if pointers.size == 1:
                self._synchronise((id(region), int(hit.offsets[0]) + hit.argument.start))
        return real, allowed

    def _track_uninitialised(self, hit: _Hit, operation: str, shape: tuple[int, ...]) -> None:
        if hit.argument.region.init is not None:
            bad = ~hit.argument.region.init[hit.offsets + hit.argument.start]
            self._lanes_report(FindingKind.UNINITIALISED_READ, operation, hit, shape, bad, None)

    def _synchronise(self, word: tuple[int, int]) -> None:
        """A scalar atomic on one word orders this program after those that used it before.

        Locks and counters work this way; what came before them is no race.
        """
        released = self._released.setdefault(word, set())
        self._has_synchronised |= bool(released - self._seen)
        self._see(released)
        released |= self._seen
        self._next_epoch()
