"""Looks things up in a bundle: launches by place, tensors, values, who owned memory then.

Judges nothing and needs neither Triton nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypocenter.errors import UsageError
from hypocenter.record.bundle import Bundle
from hypocenter.record.events import (
    Allocated,
    AllocationRecord,
    Copied,
    Freed,
    Launched,
    LaunchRecord,
    Place,
    Stepped,
    TensorRecord,
    Values,
    Waited,
)

#: The plan of a Place whose launch belongs to no plan; its `launch` is the event's `seq` then.
OUTSIDE_PLANS = -1


class BundleIndex:
    """A bundle with its records by their ids."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.tensors = {tensor.id: tensor for tensor in bundle.tensors}
        self.plans = {plan.id: plan for plan in bundle.plans}
        self.sources = {source.id: source for source in bundle.sources}
        self.events = tuple(sorted(bundle.events, key=lambda event: event.seq))
        self.allocations: dict[int, AllocationRecord] = {}
        self.freed: dict[int, Freed] = {}
        self.stepped: dict[tuple[int, int], Stepped] = {}
        self.launched: dict[int, Launched] = {}
        for event in self.events:
            if isinstance(event, Allocated):
                self.allocations[event.allocation.id] = event.allocation
            elif isinstance(event, Freed):
                self.freed[event.allocation] = event
            elif isinstance(event, Stepped):
                self.stepped[event.step, event.plan] = event
            elif isinstance(event, Launched):
                self.launched[event.seq] = event

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

    def interval(self) -> tuple[Place, ...]:
        """The launches that may have been under way at the end: after `completed`, to `submitted`.

        Where no mark says what was completed, what came before the last copy to the host was.
        """
        progress = self.bundle.progress
        first, last = progress.completed, progress.submitted
        if last is None:
            return tuple(self._outside())
        places = self.places()
        if last not in places:  # the event of its step is lost
            return tuple(Place(last.step, last.plan, i) for i in range(last.launch + 1))
        places = places[: places.index(last) + 1]
        if first in places:
            return places[places.index(first) + 1 :]
        done = self._last_copy_out(self.seq(last))
        return tuple(place for place in places if self.seq(place) > done)

    def seq(self, place: Place) -> int:
        """Number of the event that `place` belongs to; 0 when that event is lost."""
        if place.plan == OUTSIDE_PLANS:
            return place.launch
        event = self.stepped.get((place.step, place.plan))
        return event.seq if event is not None else 0

    def _outside(self) -> Iterator[Place]:
        done = self._last_copy_out(self.events[-1].seq if self.events else 0)
        for seq, event in self.launched.items():
            if seq > done:
                yield Place(event.step, OUTSIDE_PLANS, seq)

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
        """The event that freed `allocation` before the launch at `place`, if one did."""
        event = self.freed.get(allocation)
        if event is None:
            return None
        seq = self.seq(place)
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

    def values(self, place: Place) -> dict[int, Values]:
        """What tensors held before the launch at `place`, as far as the bundle knows, by id.

        Snapshots of that very launch win over what the host put into inputs, then or before.
        """
        seq = self.seq(place)
        found: dict[int, Values] = {}
        for event in self.events:
            if isinstance(event, Stepped) and event.seq <= seq:
                found.pop(
                    event.filled_by_device, None
                )  # whatever it held, the device has put others there
                found |= {values.tensor: values for values in event.inputs}
        for snapshot in self.bundle.snapshots:
            if (snapshot.step, snapshot.plan, snapshot.launch) == (
                place.step,
                place.plan,
                place.launch,
            ):
                found |= {values.tensor: values for values in snapshot.values}
        return found
