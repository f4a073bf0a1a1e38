"""Looks things up in a bundle: launches, those under way at the end, values, owners of memory.

The one index of a bundle: doctor, replay and diff ask it. Judges nothing, needs no Triton and no
torch.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass
from typing import TypeVar

from hypocenter.base.errors import UsageError
from hypocenter.record.bundle import Bundle
from hypocenter.record.engine_events import Event
from hypocenter.record.events import (
    OUTSIDE_PLANS,
    Allocated,
    AllocationRecord,
    Captured,
    Copied,
    Freed,
    GraphReplayed,
    Launched,
    LaunchRecord,
    MaskedOff,
    Place,
    Rejected,
    Stepped,
    TensorRecord,
    UnwrittenRead,
    Values,
    Waited,
)
from hypocenter.settings.environment import launch_blocking

_E = TypeVar("_E", bound=Event)


@dataclass(frozen=True, slots=True)
class LaunchMade:
    """A launch that a step made, or one outside of every plan; refused ones have no `place`.

    `seq` is the number of the event that tells of it, or of the replay of its graph; 0 when that
    event is lost.
    """

    launch: LaunchRecord
    step: int
    seq: int
    place: Place | None = None
    #: Outside of plans, the graph that it was captured into.
    graph: int = 0

    @property
    def where(self) -> str:
        if self.place is None:
            return f"step {self.step}, outside the plan"
        if self.place.plan == OUTSIDE_PLANS:
            at = f" at {self.launch.site}" if self.launch.site else ""
            graph = f", captured into graph {self.graph}" if self.graph else ""
            # A program that is not ours has no steps: each of its launches counts as one.
            return f"{'step' if self.launch.facts else 'launch'} {self.step}{at}{graph}"
        return f"step {self.place.step}, launch {self.place.launch}"


class BundleIndex:
    """A bundle with its records by their ids."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.tensors = {tensor.id: tensor for tensor in bundle.tensors}
        self.plans = {plan.id: plan for plan in bundle.plans}
        self.sources = {source.id: source for source in bundle.sources}
        self.events = tuple(sorted(bundle.events, key=lambda event: event.seq))
        #: By the ids of allocations: what they are, and the events that made and freed them.
        self.allocations: dict[int, AllocationRecord] = {}
        self.allocated: dict[int, Allocated] = {}
        self.freed: dict[int, Freed] = {}
        self.stepped: dict[tuple[int, int], Stepped] = {}
        self.launched: dict[int, Launched] = {}
        for event in self.events:
            if isinstance(event, Allocated):
                self.allocations[event.allocation.id] = event.allocation
                self.allocated[event.allocation.id] = event
            elif isinstance(event, Freed):
                self.freed[event.allocation] = event
            elif isinstance(event, Stepped):
                self.stepped[event.step, event.plan] = event
            elif isinstance(event, Launched):
                self.launched[event.seq] = event
            elif isinstance(event, MaskedOff) and event.launched not in self.launched:
                # Of a long run the launch itself may be told of no more.
                made = Launched(seq=event.launched, step=event.step, launch=event.launch)
                self.launched[event.launched] = made

    def events_of(self, kind: type[_E]) -> tuple[_E, ...]:
        """The events of one kind, in order."""
        return tuple(event for event in self.events if isinstance(event, kind))

    @functools.cached_property
    def unwritten_reads(self) -> dict[int, UnwrittenRead]:
        """By the number of the launch that was given a tensor last before torch read it.

        Of several reads the first one, as of what was not written then; one of which one number
        came before all others.
        """
        found: dict[int, UnwrittenRead] = {}
        given: dict[int, int] = {}
        for event in self.events:
            if isinstance(event, Launched):
                for argument in event.launch.arguments:
                    if argument.tensor in self.tensors:
                        given[self.tensors[argument.tensor].allocation] = event.seq
            elif isinstance(event, UnwrittenRead) and event.tensor in self.tensors:
                allocation = self.tensors[event.tensor].allocation
                if allocation not in given:
                    continue
                known = found.setdefault(given[allocation], event)
                if event.is_decided and not known.is_decided:
                    found[given[allocation]] = event
        return found

    # -- launches -------------------------------------------------------------------------------

    def launch(self, place: Place) -> LaunchRecord:
        """The launch at `place`; raises UsageError when the bundle has none there."""
        if place.plan == OUTSIDE_PLANS:
            event = self.launched.get(place.launch)
            if event is None:
                raise UsageError(f"the bundle has no launch outside plans of number {place.launch}")
            return event.launch
        plan = self.plans.get(place.plan)
        if plan is None:
            known = ", ".join(map(str, self.plans)) or "none"
            raise UsageError(f"the bundle has no plan {place.plan}; its plans are {known}")
        if not 0 <= place.launch < len(plan.launches):
            raise UsageError(
                f"launch {place.launch} of plan {plan.name}, but it has {len(plan.launches)}"
            )
        return plan.launches[place.launch]

    def places(self, step: int | None = None) -> tuple[Place, ...]:
        """All launches, or those of one step, in the order in which the host made them."""
        found: list[Place] = []
        for event in self.events:
            if step is not None and event.step != step:
                continue
            if isinstance(event, Stepped) and event.plan in self.plans:
                num_launches = len(self.plans[event.plan].launches)
                found += (Place(event.step, event.plan, i) for i in range(num_launches))
            elif isinstance(event, Launched):
                found.append(Place(event.step, OUTSIDE_PLANS, event.seq))
        return tuple(found)

    @functools.cached_property
    def launches(self) -> tuple[LaunchMade, ...]:
        """Every launch that was begun, in order; of the last step only what was submitted.

        What was captured outside of plans counts where its graph was replayed last, if it was.
        """
        places = self.places()
        last = self.bundle.progress.submitted
        num_submitted = places.index(last) + 1 if last in places else len(places)
        made = [
            LaunchMade(self.launch(place), place.step, self.seq(place), place, self._graph(place))
            for number, place in enumerate(places)
            # Launches outside plans leave no mark, but each has an event of its own.
            if number < num_submitted or place.plan == OUTSIDE_PLANS
        ]
        if not any(use.graph for use in made):
            return tuple(made)
        ran = [use for use in made if not use.graph or use.graph in self._last_replays]
        return tuple(sorted(ran, key=lambda use: use.seq))

    @functools.cached_property
    def _last_replays(self) -> dict[int, GraphReplayed]:
        return {event.graph: event for event in self.events_of(GraphReplayed)}

    @functools.cached_property
    def _watched(self) -> dict[int, frozenset[int]]:
        """Of each graph the memory that is not its own."""
        return {event.graph: frozenset(event.allocations) for event in self.events_of(Captured)}

    def _graph(self, place: Place) -> int:
        """The graph that took the launch outside of plans at `place`, or 0."""
        event = self.launched.get(place.launch) if place.plan == OUTSIDE_PLANS else None
        return event.graph if event is not None else 0

    @functools.cached_property
    def under_way(self) -> tuple[LaunchMade, ...]:
        """The launches that may have been under way at the end: after `completed`, to `submitted`.

        Where no mark says what was completed, what came before the last copy to the host was. Of
        launches that were waited for one by one it is the last alone.
        """
        progress = self.bundle.progress
        last = progress.submitted
        if launch_blocking(self.bundle.environment) and self.bundle.is_foreign:
            return self.launches[-1:]
        if last is not None and last.plan in self.plans and last not in self.places():
            # The event of its step is lost, and with it what came before.
            submitted = self.plans[last.plan].launches[: max(0, last.launch + 1)]
            return tuple(
                LaunchMade(launch, last.step, 0, Place(last.step, last.plan, number))
                for number, launch in enumerate(submitted)
            )
        made = self.launches
        for number, launch in enumerate(made):
            if launch.place == progress.completed:
                return made[number + 1 :]
        end = self.events[-1].seq if self.events else 0
        done = self._last_copy_out(end if last is None else self.seq(last))
        return tuple(launch for launch in made if launch.seq > done)

    @functools.cached_property
    def refused(self) -> tuple[LaunchMade, ...]:
        """Launches that were refused before they were made."""
        return tuple(
            LaunchMade(event.launch, event.step, event.seq)
            for event in self.events_of(Rejected)
            if event.launch is not None
        )

    def launches_of(self, event: Stepped | Launched | GraphReplayed) -> list[LaunchMade]:
        """The launches that one step made, or that the last replay of a graph did."""
        return self._by_seq.get(event.seq, [])

    @functools.cached_property
    def _by_seq(self) -> dict[int, list[LaunchMade]]:
        grouped: dict[int, list[LaunchMade]] = {}
        for launch in self.launches:
            grouped.setdefault(launch.seq, []).append(launch)
        return grouped

    def seq(self, place: Place) -> int:
        """Number of the event that `place` belongs to; 0 when that event is lost.

        Of what was captured outside of plans it is the last replay, if there was one.
        """
        if place.plan == OUTSIDE_PLANS:
            replay = self._last_replays.get(self._graph(place))
            return replay.seq if replay is not None else place.launch
        event = self.stepped.get((place.step, place.plan))
        return event.seq if event is not None else 0

    def _last_copy_out(self, before: int) -> int:
        """Of the copies to the host before event `before`, which it has waited for, the last."""
        waited = {(e.copied_in, e.tensor) for e in self.events if isinstance(e, Waited)}
        copies = (
            event.seq
            for event in self.events
            if isinstance(event, Copied)
            and event.direction == "out"
            and (not event.is_pinned or (event.step, event.tensor) in waited)
        )
        return max((seq for seq in copies if seq < before), default=0)

    # -- memory ---------------------------------------------------------------------------------

    def is_freed(self, allocation: int, place: Place) -> Freed | None:
        """The event that freed `allocation` before the launch at `place`, if one did.

        Memory of a graph's own pool is there at its replays, after its last tensor has gone.
        """
        event = self.freed.get(allocation)
        if event is None:
            return None
        graph, seq = self._graph(place), self.seq(place)
        if graph and allocation not in self._watched.get(graph, ()):
            seq = place.launch
        is_before = event.seq < seq if seq else event.step < place.step
        return event if is_before else None

    def room(self, tensor: TensorRecord, place: Place) -> int:
        """Bytes from the tensor's first element that belong to it: 0 when it was freed."""
        if self.is_freed(tensor.allocation, place):
            return 0
        allocation = self.allocations.get(tensor.allocation)
        if allocation is None:
            return tensor.extent_bytes
        start = tensor.address - allocation.address
        return max(0, min(tensor.extent_bytes, allocation.num_bytes - start))

    def owner(self, device: str, address: int, place: Place) -> AllocationRecord | None:
        """The allocation that `address` of `device` belonged to at `place`."""
        for allocation in self.allocations.values():
            if allocation.device != device or self.is_freed(allocation.id, place):
                continue
            if allocation.address <= address < allocation.address + allocation.num_bytes:
                return allocation
        return None

    # -- values ---------------------------------------------------------------------------------

    @functools.cached_property
    def _written(self) -> dict[int, list[tuple[int, Values | None]]]:
        """Of each tensor the events that filled it; None where nobody knows with what."""
        written: dict[int, list[tuple[int, Values | None]]] = {}
        for event in self.events_of(Stepped):
            if event.filled_by_device:  # whatever it held, the device has put others there
                written.setdefault(event.filled_by_device, []).append((event.seq, None))
            for values in event.inputs:
                written.setdefault(values.tensor, []).append((event.seq, values))
        return written

    def values_of(self, tensor: int, seq: int) -> Values | None:
        """What the host put last into a tensor at or before event `seq`, or what it held then."""
        written = self._written.get(tensor, [])
        at = bisect.bisect_right(written, seq, key=lambda pair: pair[0])
        if at:
            return written[at - 1][1]
        outside = self.launched.get(seq)
        held = self._snapshots.get(Place(outside.step, OUTSIDE_PLANS, seq)) if outside else None
        return held.get(tensor) if held else None

    @functools.cached_property
    def _snapshots(self) -> dict[Place, dict[int, Values]]:
        """What was read of tensors right before launches."""
        held: dict[Place, dict[int, Values]] = {}
        for snapshot in self.bundle.snapshots:
            read = held.setdefault(Place(snapshot.step, snapshot.plan, snapshot.launch), {})
            read |= {values.tensor: values for values in snapshot.values}
        for outcome in self.bundle.outcomes:
            read = held.setdefault(Place(outcome.step, OUTSIDE_PLANS, outcome.launch), {})
            read |= {values.tensor: values for values in outcome.given}
        return held

    def values(self, place: Place) -> dict[int, Values]:
        """What tensors held before the launch at `place`, as far as the bundle knows, by id.

        Snapshots of that very launch win over what the host put into inputs, then or before.
        """
        seq = self.seq(place)
        last = ((tensor, self.values_of(tensor, seq)) for tensor in self._written)
        known = {tensor: values for tensor, values in last if values is not None}
        return known | self._snapshots.get(place, {})
