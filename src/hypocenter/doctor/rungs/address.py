"""Rung: the address of the fault, and the ranges of copies, joined to the allocations of then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypocenter.doctor.case import Case
from hypocenter.doctor.causes import Cause
from hypocenter.doctor.diagnosis import Claim, GpuSight, Proof, RootCause, Verdict, proven, row
from hypocenter.doctor.gpu_sight import sight_of
from hypocenter.record.bundle import STDERR
from hypocenter.record.events import AllocationRecord, Copied
from hypocenter.record.gap import UNWATCHED, Gap

NAME = "address"
_NULL_BYTES = 1 << 16
#: Farther than this from every allocation, an address is no overrun by a few rows.
NEAR_BYTES = 64 << 20
_WRAP = 1 << 32
_NO_GPU = ("", "cpu", "interpreter")


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What an address is: `kind` is null, live, freed, host, past, before, far or unknown.

    `distance` counts bytes from the end (past) or the start (before, live) of `allocation`.
    """

    kind: str
    text: str
    allocation: AllocationRecord | None = None
    distance: int = 0


def locate(case: Case, address: int, num_bytes: int, device: str) -> Neighbour:
    """What lies in the `num_bytes` at `address`, by the table of allocations at the end."""
    if address < _NULL_BYTES:
        return Neighbour("null", f"{address:#x} is the null page")
    records = [record for record in case.allocations.values() if record.address]
    # A page holds several allocations: one that reaches into it explains no fault in it.
    live = _holding(case, records, address, num_bytes, freed=False)
    if live is not None and live.kind == "device" and live.device == device:
        at = address - live.address
        return Neighbour(
            "live",
            f"{address:#x} is inside {_who(case, live)}, byte {at} of {live.num_bytes}",
            live,
            at,
        )
    if live is not None:
        return Neighbour(
            "host",
            f"{address:#x} is in {live.kind} memory of the host: {_who(case, live)}",
            live,
            address - live.address,
        )
    gone = _holding(case, records, address, num_bytes, freed=True)
    if gone is not None:
        freed = case.freed[gone.id]
        text = f"{address:#x} is in {_who(case, gone)}, freed at step {freed.step} ({freed.site})"
        return Neighbour("freed", text, gone, address - gone.address)
    return _nearest(
        case, [record for record in records if record.device == device], address, num_bytes
    )


def addresses(case: Case) -> list[Claim]:
    """What the fault's address says, and that the copy which reported it is innocent."""
    claims = list(_copies(case))
    fault = case.bundle.fault
    if case.kind != "crash":
        return claims
    if fault.address is None:
        is_on_gpu = any(use.launch.device not in _NO_GPU for use in case.launches)
        if is_on_gpu and not any(sight.address for sight in _sights(case)):
            missing = case.bundle.missing
            is_kept = UNWATCHED not in missing and all(gap.what != STDERR for gap in missing)
            why = "this driver does not give it" if is_kept else "what was written was not kept"
            case.leave_unseen(Gap.not_recorded("the address of the fault", why))
        return claims
    device = case.bundle.device or next((use.launch.device for use in case.launches), "")
    found = locate(case, fault.address, fault.address_bytes, device)
    culprit = _culprit(case, found)
    if culprit is not None:
        claims.append(culprit)
    return [*claims, *_judge(case, found, fault.address, fault.address_bytes)]


def _sights(case: Case) -> Iterator[GpuSight]:
    """What GPUs say themselves of where they stopped: it has the address mostly."""
    return (sight for stop in case.bundle.gpu_stops if (sight := sight_of(case, stop)) is not None)


def _judge(case: Case, found: Neighbour, address: int, num_bytes: int) -> Iterator[Claim]:
    text = f"the fault's address: {found.text}"
    meaning = {
        "null": Cause.NULL_POINTER,
        "freed": Cause.USE_AFTER_FREE,
        "host": Cause.HOST_POINTER,
        "past": Cause.BUFFER_TOO_SMALL,
    }
    for kind, cause in meaning.items():
        if kind == found.kind:
            yield row(
                cause,
                Verdict.INCONCLUSIVE,
                NAME,
                text,
                would_refute="another launch that reaches the address for a reason of its own",
            )
        elif kind != "past":
            yield row(
                cause,
                Verdict.REFUTED,
                NAME,
                text,
                would_refute="an address in such memory",
            )
    if found.kind in ("far", "past", "before"):
        wrapped = list(_wraps(case, address, num_bytes))
        yield row(
            Cause.OFFSET_OVERFLOW,
            Verdict.INCONCLUSIVE,
            NAME,
            *(wrapped or (f"{text}; no argument's address plus a wrapped 32-bit offset gives it",)),
            would_refute="the address being explained by an index that was recorded",
        )


def _culprit(case: Case, found: Neighbour) -> Claim | None:
    """The launch under way with an argument in the memory that the address names.

    For kernels of which no contract is known, and memory that was freed while they were under way.
    """
    cause = {
        "null": Cause.NULL_POINTER,
        "freed": Cause.USE_AFTER_FREE,
        "host": Cause.HOST_POINTER,
    }.get(found.kind)
    if cause is None or any(claim.root is not None for claim in case.claims):
        return None
    users = [
        (use, name, tensor)
        for use in case.index.under_way
        for name, tensor in case.tensors_of(use.launch).items()
        if (tensor.allocation == found.allocation.id if found.allocation else not tensor.address)
    ]
    if not users:
        return None
    use, name, tensor = users[0]
    freed = case.freed.get(tensor.allocation)
    wrong, right, fix = {
        Cause.NULL_POINTER: (
            "is null",
            f"a tensor for {name}",
            f"Pass a tensor for {name}, or do not launch",
        ),
        Cause.USE_AFTER_FREE: (
            f"was freed at step {freed.step} ({freed.site})" if freed else "was freed",
            f"{tensor.name} not freed",
            f"Wait for the launches with {tensor.name} before it is freed"
            f"{f' at {freed.site}' if freed else ''}",
        ),
        Cause.HOST_POINTER: (
            "lies in memory of the host",
            f"{tensor.name} on {use.launch.device}",
            f"Copy {tensor.name} to {use.launch.device} and pass the copy",
        ),
    }[cause]
    others = sum(other.id != tensor.id for other in case.tensors_of(use.launch).values())
    access = case.access(use.launch, name)
    root = RootCause(
        cause=cause,
        sentence=f"{use.launch.kernel}: {name} ({tensor.name}) {wrong}",
        fix=fix,
        proof=Proof(
            f"the fault's address: {found.text}; of what was under way, {use.launch.kernel} was "
            f"given that memory as {name}",
            right,
            f"with {right} the address belongs to no argument of a launch that was under way: the "
            f"other {others} of {use.launch.kernel} lie elsewhere",
        ),
        kernel=use.launch.kernel,
        argument=name,
        tensor=tensor.name,
        place=use.place,
    ).at(access)
    return proven(
        root, NAME, (), "no launch under way with an argument there", use.seq, (tensor.id,)
    )


def _wraps(case: Case, address: int, num_bytes: int) -> Iterator[str]:
    """Arguments for which the address is a 32-bit offset that lost multiples of 2**32 elements."""
    seen: set[int] = set()
    for use in case.index.under_way:
        for name, tensor in case.tensors_of(use.launch).items():
            if tensor.id in seen or not tensor.extent_bytes:
                continue
            seen.add(tensor.id)
            for width in (1, 2, 4, 8):
                offset = address - tensor.address
                turns = -(offset // (_WRAP * width))
                right = offset + turns * _WRAP * width
                if 0 < turns <= 2 and 0 <= right < tensor.extent_bytes + num_bytes:
                    yield (
                        f"{address:#x} is {name} ({tensor.name}) of {use.launch.kernel} with a "
                        f"32-bit offset that wrapped: byte {right} lies inside, {right} - "
                        f"{turns * _WRAP * width} was used"
                    )
                    break


def _holding(
    case: Case, records: list[AllocationRecord], address: int, num_bytes: int, *, freed: bool
) -> AllocationRecord | None:
    """The allocation that holds the whole range; of freed ones, the last that touches it."""
    found = None
    for record in records:
        if (record.id in case.freed) is not freed:
            continue
        first, end = record.address, record.address + record.num_bytes
        inside = first <= address and address + num_bytes <= end
        if inside or (freed and address < end and first < address + num_bytes):
            found = record
    return found


def _nearest(
    case: Case, records: list[AllocationRecord], address: int, num_bytes: int
) -> Neighbour:
    before = [record for record in records if record.address <= address + num_bytes - 1]
    below = max(before, key=lambda record: record.address + record.num_bytes, default=None)
    if below is not None:
        past = max(address - (below.address + below.num_bytes), 0)
        if past <= NEAR_BYTES:
            return Neighbour(
                "past",
                f"{address:#x} is {past} bytes past {_who(case, below)}, which "
                f"has {below.num_bytes} bytes",
                below,
                past,
            )
    after = min(
        (record for record in records if record.address > address),
        key=lambda record: record.address,
        default=None,
    )
    if after is not None and after.address - address <= NEAR_BYTES:
        gap = after.address - address
        return Neighbour(
            "before", f"{address:#x} is {gap} bytes before {_who(case, after)}", after, gap
        )
    near = min(records, key=lambda record: abs(record.address - address), default=None)
    if near is None:
        return Neighbour("unknown", f"no allocation is known to compare {address:#x} with")
    gap = abs(near.address - address)
    text = f"{address:#x} is far from everything: {gap} bytes ({gap / 2**30:.1f} GiB) from "
    return Neighbour("far", f"{text}{_who(case, near)}, the nearest", near, gap)


def _copies(case: Case) -> Iterator[Claim]:
    """The copy that reported the fault: whether its own range was in order."""
    if not case.bundle.fault.is_asynchronous:
        return
    last = next((e for e in reversed(case.bundle.events) if isinstance(e, Copied)), None)
    if last is None or "copy" not in case.bundle.fault.call.lower().replace("memcpy", "copy"):
        return
    way = "to the host" if last.direction == "out" else "to the device"
    tensor = case.tensors.get(last.tensor) if last.tensor is not None else None
    name = tensor.name if tensor else hex(last.address)
    for record in case.allocations.values():
        end = record.address + record.num_bytes
        if record.address <= last.address and last.address + last.num_bytes <= end:
            freed = case.freed.get(record.id)
            if freed is None or freed.seq > last.seq:
                yield row(
                    Cause.BUFFER_TOO_SMALL,
                    Verdict.REFUTED,
                    NAME,
                    f"the copy of {name} {way}, which reported the fault, is innocent: its "
                    f"{last.num_bytes} bytes at {last.address:#x} lie wholly inside "
                    f"{_who(case, record)} ({record.num_bytes} bytes, alive)",
                    would_refute="a range that leaves its allocation",
                    kernel="copy",
                    argument=name,
                )
                return
    yield row(
        Cause.BUFFER_TOO_SMALL,
        Verdict.INCONCLUSIVE,
        NAME,
        f"the copy of {name} {way} ({last.num_bytes} bytes at {last.address:#x}) lies in no live "
        "allocation that is known",
        would_refute="an allocation around its range",
        kernel="copy",
        argument=name,
    )


def _who(case: Case, record: AllocationRecord) -> str:
    owner = f" ({record.owner})" if record.owner else ""
    return f"{record.name or f'allocation {record.id}'}{owner}"
