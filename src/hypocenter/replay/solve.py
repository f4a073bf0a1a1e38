"""Which entry of a tensor, that nobody recorded, leads an access to where a GPU stopped.

A program is replayed with zeros for the entries that it loads, with ones, and with twos; where the
address grows evenly with an entry, the entry follows from the address: address = base + entry *
step. Of an address whose upper half is lost the entry is known up to a multiple.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.record.bundle_index import BundleIndex
from hypocenter.record.events import Place
from hypocenter.replay.arguments import Argument
from hypocenter.replay.corrections import TensorCorrection
from hypocenter.replay.findings import Finding, Site
from hypocenter.replay.trace import LaneAccess, ProgramTrace, trace_program

#: Loads whose entries are tried, and those of one load.
MAX_LOADS, MAX_ENTRIES = 16, 4096
#: Entries that may have wrapped are tried, the lowest first.
MAX_WRAPPED = 16
#: Accesses behind the first that is solved, in which the same line may come again.
MAX_ROUNDS = 64
#: Neighbouring elements that one thread of a GPU may have, of an access in a row.
_RUNS = (1, 2, 4, 8, 16, 32)

Elements = dict[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """What the GPU asked for: an address by the number of the thread in its block.

    Of each address the bits in `known` count. `places` are (file, line) of the instruction, the
    innermost first, and `operation` is load, store or atomic.
    """

    operation: str
    places: tuple[tuple[str, int], ...]
    addresses: Mapping[int, int]
    known: int

    @property
    def modulus(self) -> int:
        return self.known + 1


@dataclass(frozen=True, slots=True)
class LoadedEntry:
    """An entry that a program loaded: `width_bytes` at byte `offset` of a tensor argument."""

    argument: str
    offset: int
    width_bytes: int
    item_bytes: int
    indices: tuple[tuple[int, ...], ...]

    @property
    def is_cast(self) -> bool:
        """Whether it is read in another width than its tensor's elements have."""
        return self.width_bytes != self.item_bytes

    def elements(self, value: int) -> Elements:
        """What the tensor's own elements hold, where the entry holds `value`."""
        bits, width = value % (1 << 8 * self.width_bytes), 8 * self.item_bytes
        parts = (bits >> width * at & (1 << width) - 1 for at in range(len(self.indices)))
        signed = (part - (1 << width) if part >> width - 1 else part for part in parts)
        return dict(zip(self.indices, signed, strict=True))


@dataclass(frozen=True, slots=True)
class Wrapped:
    """An entry inside of the table with which the address comes out as well, for its product wraps.

    `finding` is what the replay with it says of that. `is_clean_wide`: with the entry in 64 bits
    nothing is wrong at the access.
    """

    value: int
    finding: Finding
    is_clean_wide: bool


@dataclass(frozen=True, slots=True)
class Solution:
    """`entry` held `value`, or that and a multiple of `modulus` where this is not 0.

    Where a thread of the GPU may have loaded others instead, `others` are these, in order. The
    access goes `step` bytes farther for each; it aims at `target`, None where the entry is itself
    an address. `finding` is what the replay with that entry says of the access, in which `address`
    is where the GPU stopped. `largest` is the last entry with which nothing is wrong there; with
    `is_alone` it is what the first of the elements is by itself. `wrapped` are other entries that
    lead to the address.
    """

    entry: LoadedEntry
    loaded_at: Site
    value: int
    modulus: int
    step: int
    target: str | None
    finding: Finding
    address: int
    largest: int | None
    is_alone: bool = False
    others: tuple[LoadedEntry, ...] = ()
    wrapped: tuple[Wrapped, ...] = ()


def matching(trace: ProgramTrace, asked: GpuRequest) -> list[LaneAccess]:
    """The accesses of a program that stand at the GPU's line and do what it did there."""
    wanted = {(_base(file), line) for file, line in asked.places}
    return [
        access
        for access in trace.accesses
        if access.operation == asked.operation
        and access.pointers.size
        and any((_base(site.file), site.line) in wanted for site in access.sites)
    ]


def reaches(trace: ProgramTrace, access: LaneAccess, asked: GpuRequest) -> bool:
    """Whether every address that the GPU asked for is one of this access's."""
    base = trace.argument_of(access)
    found = {address & asked.known for address in trace.real(access, base)}
    return bool(asked.addresses) and found >= set(asked.addresses.values())


def solve(
    index: BundleIndex, place: Place, program: int, asked: GpuRequest, *, allow_source: bool = False
) -> Solution | None:
    """The entry that explains where the GPU stopped; None where none of the program's does.

    Raises as `trace_program` does.
    """
    solver = _Solver(index, place, program, asked, allow_source)
    for number, access in enumerate(solver.zeros.accesses):
        if access not in matching(solver.zeros, asked):
            continue
        for load in solver.loads_before(number):
            solution = solver.by(number, load)
            if solution is not None:
                others = {*solution.others, *solver.others_of(number, solution)}
                ordered = sorted(others, key=lambda other: other.offset)
                return replace(solution, others=tuple(ordered))
    return None


class _Solver:
    def __init__(
        self, index: BundleIndex, place: Place, program: int, asked: GpuRequest, allow_source: bool
    ) -> None:
        self._index, self._place, self._program = index, place, program
        self._asked, self._allow_source = asked, allow_source
        self._seq = index.seq(place)
        self.zeros = self._trace({})

    def _trace(self, corrections: Mapping[str, TensorCorrection]) -> ProgramTrace:
        return trace_program(
            self._index, self._place, self._program, corrections, allow_source=self._allow_source
        )

    def loads_before(self, number: int) -> list[list[LoadedEntry]]:
        """Of each load before access `number` the entries, where nobody recorded what they held.

        The nearest load first: it is the likeliest to have given the address.
        """
        found = []
        for access in reversed(self.zeros.accesses[:number]):
            if access.operation == "load" and access.values.dtype.kind in "iu":
                entries = self._entries(access)
                if entries and entries not in found:
                    found.append(entries)
        return found[:MAX_LOADS]

    def others_of(self, number: int, solution: Solution) -> Iterator[LoadedEntry]:
        """Entries that may have led there instead, of later rounds of a loop: those that the same
        load gives before another access in the line of access `number`."""
        first = self.zeros.accesses[number]
        for at, access in enumerate(self.zeros.accesses[: number + MAX_ROUNDS]):
            if at == number or access.sites != first.sites:
                continue
            for load in self.loads_before(at)[:1]:
                if solution.entry in load or load[0].argument != solution.entry.argument:
                    continue
                found = self.by(at, load)
                if found is not None and found.value == solution.value:
                    yield from (found.entry, *found.others)

    def _entries(self, access: LaneAccess) -> list[LoadedEntry]:
        argument = self.zeros.argument_of(access)
        tensor = self.zeros.tensors.get(argument.name) if argument is not None else None
        if argument is None or tensor is None or argument.region.data is None:
            return []
        if self._index.values_of(tensor.id, self._seq) is not None:
            return []
        offsets = np.unique(access.pointers.astype(np.int64) - argument.address)
        if len(offsets) > MAX_ENTRIES:
            return []
        entries = (_entry(argument, int(offset), access.width_bytes) for offset in offsets)
        return [entry for entry in entries if entry is not None]

    def by(self, number: int, load: Sequence[LoadedEntry]) -> Solution | None:
        """The solution by an entry of one load, whose access `number` is the GPU's."""
        ones, twos = (self._lanes(number, load, lambda at, n=n: n) for n in (1, 2))
        zero = self.zeros.accesses[number].pointers
        if ones is None or twos is None or not zero.size == ones.size == twos.size:
            return None
        steps = (ones - zero).view(np.int64)
        if not steps.any() or (twos - ones != ones - zero).any():
            return None
        owners = np.zeros(zero.size, np.int64)
        if len(load) > 1:
            counted = self._lanes(number, load, lambda at: at)
            if counted is None or counted.size != zero.size:
                return None
            owners = _owners((counted - zero).view(np.int64), steps)
        for lane, value, modulus, address in self._candidates(number, steps, owners):
            at, step = int(owners[lane]), int(steps[lane])
            if not 0 <= at < len(load):
                continue
            found = self._try(number, load[at], value, modulus, step, address)
            if found is not None:
                fit = (value, modulus)
                alike = self._same_entries(number, steps, owners, address, fit) - {at}
                others = tuple(load[other] for other in sorted(alike) if 0 <= other < len(load))
                return replace(found, others=others)
        return None

    def _same_entries(
        self, number: int, steps: Array, owners: Array, address: int, fit: tuple[int, int]
    ) -> set[int]:
        """The entries of which the same value leads some lane to the address."""
        access, modulus = self.zeros.accesses[number], self._asked.modulus
        real = self.zeros.real(access, self.zeros.argument_of(access))
        return {
            int(owners[lane])
            for lane in range(len(real))
            if _congruent(address - real[lane], int(steps[lane]), modulus) == fit
        }

    def _lanes(self, number: int, load: Sequence[LoadedEntry], value: object) -> Array | None:
        """Where access `number` goes when the load's entries hold what `value` gives for each."""
        assert callable(value)
        elements: Elements = {}
        for at, entry in enumerate(load):
            elements |= entry.elements(value(at))
        trace = self._trace({load[0].argument: TensorCorrection(elements=elements)})
        if len(trace.accesses) <= number:
            return None
        access = trace.accesses[number]
        same = access.sites == self.zeros.accesses[number].sites
        return access.pointers if same else None

    def _candidates(
        self, number: int, steps: Array, owners: Array
    ) -> Iterator[tuple[int, int, int, int]]:
        """(lane, value, modulus of it, address) that fit the GPU's addresses, best first."""
        access, asked = self.zeros.accesses[number], self._asked
        base = self.zeros.argument_of(access)
        real = self.zeros.real(access, base)
        threads = sorted(asked.addresses)
        outside = [t for t in threads if self._is_outside(base, asked.addresses[t])]
        shared = len(set(owners.tolist())) == 1
        for lanes in _mappings(threads, len(real)):
            fits = {
                thread: _congruent(
                    asked.addresses[thread] - real[lane], int(steps[lane]), asked.modulus
                )
                for thread, lane in lanes.items()
            }
            values = set(fits.values())
            if None in values or (shared and len(values) > 1):
                continue
            thread = (outside or threads)[0]
            fit = fits[thread]
            assert fit is not None
            yield lanes[thread], *fit, asked.addresses[thread]

    def _is_outside(self, base: Argument | None, address: int) -> bool:
        tensor = self.zeros.tensors.get(base.name) if base is not None else None
        if tensor is None or self._asked.modulus < 1 << 64:
            return True
        return not tensor.address <= address < tensor.address + tensor.extent_bytes

    def _try(
        self, number: int, entry: LoadedEntry, value: int, modulus: int, step: int, address: int
    ) -> Solution | None:
        """The solution, if the replay with it goes wrong at the access that it is about."""
        base = self.zeros.argument_of(self.zeros.accesses[number])
        for chosen in _values(value, modulus, 8 * entry.width_bytes):
            corrections = {entry.argument: TensorCorrection(elements=entry.elements(chosen))}
            trace = self._trace(corrections)
            if len(trace.accesses) <= number:
                continue
            access = trace.accesses[number]
            asked_for = {where & self._asked.known for where in trace.real(access, base)}
            findings = trace.findings_at(access)
            if findings and address in asked_for:
                alone = self._alone(number, entry, chosen, modulus)
                return Solution(
                    entry=entry,
                    loaded_at=self._loaded_at(entry),
                    value=chosen,
                    modulus=modulus if modulus < 1 << min(8 * entry.width_bytes, 56) else 0,
                    step=step,
                    target=base.name if base is not None else None,
                    finding=findings[0],
                    address=address,
                    largest=self._largest(number, entry, base, step) if alone is None else alone,
                    is_alone=alone is not None,
                    wrapped=tuple(self._wrapped_entries(number, entry, chosen, step, address)),
                )
        return None

    def _wrapped_entries(
        self, number: int, entry: LoadedEntry, value: int, step: int, address: int
    ) -> Iterator[Wrapped]:
        """Entries of the table itself whose product with the row's length leaves 32 bits, and that
        lead to the address so: those that differ from `value` by what 32 bits lose."""
        access = self.zeros.accesses[number]
        base = self.zeros.argument_of(access)
        if base is None or step <= 0 or step % base.item_bytes or entry.is_cast:
            return
        lost = (1 << 32) // math.gcd(step // base.item_bytes, 1 << 32)
        past = int(access.pointers.max()) - base.address + access.width_bytes
        largest = min((base.num_bytes - past) // step, (1 << 8 * entry.width_bytes - 1) - 1)
        for candidate in range(value % lost, largest + 1, lost)[:MAX_WRAPPED]:
            elements = entry.elements(candidate)
            trace = self._trace({entry.argument: TensorCorrection(elements=elements)})
            if candidate == value or len(trace.accesses) <= number:
                continue
            asked_for = {at & self._asked.known for at in trace.real(trace.accesses[number], base)}
            found = trace.findings_at(trace.accesses[number])
            wrapping = next((finding for finding in found if finding.is_overflow), None)
            if wrapping is not None and address in asked_for:
                is_clean = self._is_clean(number, entry.argument, elements, dtype="I64")
                yield Wrapped(candidate, wrapping, is_clean)

    def _loaded_at(self, entry: LoadedEntry) -> Site:
        return next(
            access.sites[0]
            for access in self.zeros.accesses
            if access.operation == "load"
            and (argument := self.zeros.argument_of(access)) is not None
            and argument.name == entry.argument
            and argument.address + entry.offset in access.pointers
        )

    def _alone(self, number: int, entry: LoadedEntry, value: int, modulus: int) -> int | None:
        """Of several elements that are read as one: the first by itself, if that goes well."""
        first = value % (1 << 8 * entry.item_bytes)
        is_known = entry.is_cast and modulus >= 1 << 8 * entry.item_bytes
        if not is_known or not self._is_clean(number, entry.argument, entry.elements(first)):
            return None
        return first

    def _largest(
        self, number: int, entry: LoadedEntry, base: Argument | None, step: int
    ) -> int | None:
        """The last entry with which the replay finds nothing wrong at the access."""
        if base is None:
            return self._live_address(number, entry)
        if step <= 0:
            return None
        access = self.zeros.accesses[number]
        past = int(access.pointers.max()) - base.address + access.width_bytes
        largest = (base.num_bytes - past) // step
        if largest < 0 or not self._is_clean(number, entry.argument, entry.elements(largest)):
            return None
        return largest

    def _live_address(self, number: int, entry: LoadedEntry) -> int | None:
        """Of an entry that is an address: that of a tensor of the launch in which all goes well.

        All entries of its tensor have it: zeros in the others are no addresses.
        """
        every = [
            other
            for access in self.zeros.accesses
            if access.operation == "load" and access.values.dtype.kind in "iu"
            for other in self._entries(access)
            if other.argument == entry.argument
        ]
        for argument in sorted(self.zeros.arguments, key=lambda a: -a.num_bytes):
            if argument.name != entry.argument:
                elements: Elements = {}
                for other in (*every, entry):
                    elements |= other.elements(argument.address)
                if self._is_clean(number, entry.argument, elements):
                    return argument.address
        return None

    def _is_clean(
        self, number: int, argument: str, elements: Elements, dtype: str | None = None
    ) -> bool:
        trace = self._trace({argument: TensorCorrection(elements=elements, dtype=dtype)})
        return len(trace.accesses) > number and not trace.findings_at(trace.accesses[number])


def _base(file: str) -> str:
    return file.rsplit("/", 1)[-1]


def _entry(argument: Argument, offset: int, width: int) -> LoadedEntry | None:
    """The entry at a byte offset, as the elements of the tensor that it covers whole."""
    item = argument.item_bytes
    if width % item or offset % item or not 0 <= offset <= argument.num_bytes - width:
        return None
    covered = [argument.element(offset + at) for at in range(0, width, item)]
    indices = tuple(index for index in covered if index is not None)
    if len(indices) != len(covered):
        return None
    return LoadedEntry(argument.name, offset, width, item, indices)


def _owners(counted: Array, steps: Array) -> Array:
    """Which entry each lane's address grows with; -1 for none."""
    moving = steps != 0
    found: Array = np.where(moving, counted // np.where(moving, steps, 1), -1)
    return found


def _mappings(threads: Sequence[int], num_lanes: int) -> Iterator[dict[int, int]]:
    """Lanes of the replay that threads may be: each has some neighbours, in turns; else any."""
    for run in _RUNS:
        if run <= num_lanes:
            yield {thread: thread * run % num_lanes for thread in threads}
    for lane in range(min(num_lanes, MAX_ENTRIES)):
        yield {threads[0]: lane}


def _congruent(distance: int, step: int, modulus: int) -> tuple[int, int] | None:
    """(value, modulus of it) with value * step = distance, both modulo `modulus`."""
    if not step:
        return None
    shared = math.gcd(step, modulus)
    if distance % shared:
        return None
    rest = modulus // shared
    value = distance // shared * pow(step // shared, -1, rest) % rest
    return value, rest


def _values(value: int, modulus: int, num_bits: int) -> Iterator[int]:
    """Numbers of so many bits, with a sign, that are `value` modulo `modulus`, the smallest first.

    An address as an entry has no sign, but is less than half of what fits.
    """
    whole = min(modulus, 1 << num_bits)
    nearest = (value + whole // 2) % whole - whole // 2
    limit = 1 << num_bits - 1
    wanted = (nearest + turn * whole for turn in (0, 1, -1, 2))
    yield from (number for number in wanted if -limit <= number < limit)
