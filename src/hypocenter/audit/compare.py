"""Two sides of a gate: their numbers compared in bits or by a distance, and their routes.

An error is planted in each: one unit of rounding of one element where bits are compared, twice the
threshold where a distance is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from hypocenter.audit.executed import Executed
from hypocenter.base.dtypes import Float32s
from hypocenter.verify.outcome import Mistake, PlantedError
from hypocenter.verify.repeats_stage import first_difference
from hypocenter.verify.rounding import distance

#: How many errors each gate plants into its own comparison.
NUM_PLANTED = 100
_MAX_KERNELS = 40


@dataclass(frozen=True, slots=True)
class AuditedRun:
    """A request that ran: what was asked of its route, what is recorded of it, and its results.

    `asked` has values of fields of `executed`; a frozenset stands for what must be among others.

    `rows` f32 [num_rows, width] are its logits, or vectors, at `positions`. `planted` is a row that
    was read again after one element had changed by one unit of rounding where the device holds it.
    """

    name: str
    asked: Mapping[str, Any]
    executed: Executed
    positions: tuple[int, ...]
    rows: Float32s
    token_ids: tuple[int, ...]
    planted: tuple[int, Float32s] | None = field(default=None, repr=False)

    def at(self, positions: tuple[int, ...]) -> Float32s:
        """Its rows at these positions. Raises KeyError for one that it has not."""
        places = {position: row for row, position in enumerate(self.positions)}
        return self.rows[[places[position] for position in positions]]


def route_mistakes(one: AuditedRun, other: AuditedRun, axis: str) -> list[Mistake]:
    """Where a side did not run as asked, or both took the same route along `axis`, a field of
    Executed in which they were to differ; empty where they need not."""
    found = [mistake for side in (one, other) for mistake in _unlike_asked(side)]
    if axis and getattr(one.executed, axis) == getattr(other.executed, axis):
        value = _short_text(getattr(one.executed, axis))
        what = f"both sides took the same route: {axis} {value}"
        found.append(Mistake(what, f"{one.name} and {other.name}", {"axis": axis}))
    return found


def _unlike_asked(side: AuditedRun) -> list[Mistake]:
    found = []
    for name, wanted in side.asked.items():
        got = getattr(side.executed, name)
        if isinstance(wanted, frozenset):
            wanted = tuple(sorted(wanted))
            is_right = set(wanted) <= set(got)
        else:
            is_right = got == wanted
        if not is_right:
            what = f"{name} was {_short_text(got)}, and {_short_text(wanted)} was asked for"
            found.append(Mistake(what, side.name, {"field": name}))
    return found


def _short_text(value: Any) -> str:
    """A value in few words: equal numbers in a row are counted."""
    if isinstance(value, tuple) and len(value) > 4:
        kinds = list(dict.fromkeys(value))
        if len(kinds) <= 2 and all(isinstance(item, int) for item in value):
            return " and ".join(f"{value.count(kind)} x {kind}" for kind in kinds)
        return f"{', '.join(map(str, value[:3]))} and {len(value) - 3} more"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def planted_routes(one: AuditedRun, other: AuditedRun, axis: str) -> PlantedError:
    """Errors in what is recorded: the same route on both sides, and a length that is cut."""
    cut = msgspec.structs.replace(other.executed, length=other.executed.length - 1)
    changed = [cut, one.executed] if axis else [cut]
    seen = sum(len(route_mistakes(one, _with(other, each), axis)) > 0 for each in changed)
    planted = "a length cut by a token" + (", both sides on one route" if axis else "")
    return PlantedError(planted, len(changed), seen)


def _with(side: AuditedRun, executed: Executed) -> AuditedRun:
    return AuditedRun(side.name, side.asked, executed, side.positions, side.rows, side.token_ids)


def bit_mistake(one: Float32s, other: Float32s, positions: tuple[int, ...]) -> Mistake | None:
    """The first element that has other bits on the other side; None where all are equal."""
    if one.shape != other.shape:
        return Mistake(f"{one.shape} numbers on one side and {other.shape} on the other")
    place = first_difference(one, other)
    if place is None:
        return None
    row, column = place
    num_differing = int((one.view(np.uint32) != other.view(np.uint32)).sum())
    details = {
        "position": positions[row],
        "element": column,
        "one": float(one[place]),
        "other": float(other[place]),
        "num_differing": num_differing,
    }
    return Mistake(f"element {column} of token {positions[row]} has other bits", details=details)


def planted_bits(one: Float32s, other: AuditedRun, positions: tuple[int, ...]) -> PlantedError:
    """One unit of rounding in one element: as the device held it, and in places drawn at random."""
    seen = num_planted = 0
    right = other.at(positions)
    if other.planted is not None and other.planted[0] in positions:
        changed = right.copy()
        changed[positions.index(other.planted[0])] = other.planted[1]
        num_planted += 1
        seen += bit_mistake(one, changed, positions) is not None
    drawn = np.random.default_rng(59)
    changed = right.copy()
    while num_planted < NUM_PLANTED:
        place = tuple(int(drawn.integers(size)) for size in changed.shape)
        kept = changed[place]
        changed[place] = np.nextafter(kept, np.float32(np.inf if drawn.integers(2) else -np.inf))
        num_planted += 1
        seen += bit_mistake(one, changed, positions) is not None
        changed[place] = kept
    return PlantedError("one unit of rounding of one element", num_planted, seen)


def distance_mistake(
    one: Float32s, other: Float32s, positions: tuple[int, ...], allowed: float
) -> Mistake | None:
    """The first token whose rows are further apart than `allowed`."""
    for position, row, right in zip(positions, other, one, strict=True):
        apart = distance(row, right)
        if not apart <= allowed:
            details = {"position": position, "distance": apart, "allowed": allowed}
            what = f"token {position} is {apart:.3g} away, and {allowed:.3g} is allowed"
            return Mistake(what, details=details)
    return None


def largest_distance(one: Float32s, other: Float32s) -> float:
    return max(distance(row, right) for row, right in zip(other, one, strict=True))


def planted_distances(
    one: Float32s, other: Float32s, positions: tuple[int, ...], allowed: float
) -> PlantedError:
    """Twice the threshold in one row, in a direction drawn at random."""
    drawn, seen = np.random.default_rng(59), 0
    changed = other.copy()
    for _ in range(NUM_PLANTED):
        row = int(drawn.integers(len(other)))
        right = one[row].astype(np.float64)
        noise = drawn.standard_normal(right.shape)
        size = float(np.sqrt(np.mean(np.square(right - right.mean()))))
        noise *= 2 * allowed * size / float(np.sqrt(np.mean(np.square(noise))))
        changed[row] = other[row] + noise
        seen += distance_mistake(one, changed, positions, allowed) is not None
        changed[row] = other[row]
    return PlantedError("a row off by twice the threshold", NUM_PLANTED, seen)


def proof(side: AuditedRun) -> dict[str, Any]:
    """What was asked of a side, and how it ran by the record, as plain data."""
    fields = msgspec.structs.asdict(side.executed)
    fields["replays"] = side.executed.replays
    fields["chunks"] = _short_text(side.executed.chunks)
    fields["kernels"] = list(side.executed.kernels[:_MAX_KERNELS])
    asked = {
        name: sorted(value) if isinstance(value, frozenset) else value
        for name, value in side.asked.items()
    }
    if "chunks" in asked:
        asked["chunks"] = _short_text(asked["chunks"])
    return {"side": side.name, "asked": asked, "executed": fields}
