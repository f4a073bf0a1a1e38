"""After a step, a line of the trace for what its plan measured.

Launches nothing: figures, and copies of elements where these are asked for, lie in room of the plan
(`model/layers/points.py`). They come to the host while the next step runs, and are written then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array, Float32s
from hypocenter.base.tensor import Tensor
from hypocenter.device import copies, memory
from hypocenter.device.plan import Plan
from hypocenter.engine.batch import Batch
from hypocenter.model.layers.points import KeptPoints, KeptRooms, PointSlot
from hypocenter.trace.points import PointGroup, Selection, StepLine
from hypocenter.trace.writing import TraceFile

if TYPE_CHECKING:
    from hypocenter.device.cpu.measuring import ArrayFigures


class _Alike(NamedTuple):
    """Points of one plan that have one shape: their names and layers, and where their figures
    are."""

    names: tuple[str, ...]
    layers: tuple[int | None, ...]
    slots: tuple[PointSlot, ...]
    places: Array

    @property
    def is_of_logits(self) -> bool:
        return self.slots[0].is_of_logits


class _Coming(NamedTuple):
    """A step whose figures are on their way: what waits for them, and for its tokens and copies."""

    step: int
    tag: int
    batch: Batch
    token_ids: Callable[[], Array]
    words: Callable[[], Array]
    #: Of each room that holds copies, and of the logits.
    rooms: dict[int, Callable[[], Array]]
    logits: Callable[[], Array] | None


class StepTrace:
    """Writes what each step of a runner left at the points that were asked for."""

    def __init__(
        self, file: TraceFile, selection: Selection, points: KeptPoints, max_data_bytes: int
    ) -> None:
        """`max_data_bytes`: of the elements themselves so many are written, in order."""
        self._file, self._selection, self._points = file, selection, points
        self._data_left = max_data_bytes
        self._num_steps = self.num_written = 0
        self._alike: dict[int, tuple[_Alike, ...]] = {}
        self._coming: _Coming | None = None
        self._is_closed = False

    def after(self, plan: Plan, batch: Batch, token_ids: Tensor) -> None:
        """Note the step that has just been launched, and write the one before it; nothing once the
        trace is closed."""
        if self._is_closed:
            return
        step, self._num_steps = self._num_steps, self._num_steps + 1
        coming = (
            self._request(step, plan, batch, token_ids)
            if self._selection.takes_step(step)
            else None
        )
        self._settle()
        self._coming = coming
        if plan.result.device == "cpu":
            # Nothing runs meanwhile, and what dies then has written all.
            self._settle()

    @property
    def missing_steps(self) -> list[int]:
        """Steps that were asked for and have not come."""
        return [step for step in self._selection.steps or () if step >= self._num_steps]

    def close(self) -> None:
        """Write the last step; raises as a copy does where its device is lost by then."""
        self._is_closed = True
        try:
            self._settle()
        finally:
            self._file.close()

    def _request(self, step: int, plan: Plan, batch: Batch, token_ids: Tensor) -> _Coming:
        """A step whose copies to the host have been asked for."""
        kept = self._points.of_plan[plan.tag]
        if plan.tag not in self._alike:
            self._alike[plan.tag] = _alike_of(kept)
        num_points = len(kept.slots)
        words = copies.to_host_later(kept.figures, num_points) if num_points else _no_words
        rooms: dict[int, Callable[[], Array]] = {}
        logits = None
        if self._data_left:
            for room, (tensor, most) in enumerate(kept.rooms):
                num_places = sum(
                    slot.room is not None and slot.room[0] == room for slot in kept.slots
                )
                rooms[room] = copies.to_host_later(memory.rows(tensor, 0, num_places * most))
            if len(batch.logit_rows) and self._selection.takes("logits", None):
                logits = copies.to_host_later(plan.result, len(batch.logit_rows))
        ids = batch.token_ids
        if batch.ids_on_device or batch.put_drafts is not None:  # the host knows not all of them
            return _Coming(
                step,
                plan.tag,
                batch,
                copies.to_host_later(token_ids, len(ids)),
                words,
                rooms,
                logits,
            )
        return _Coming(step, plan.tag, batch, lambda: ids, words, rooms, logits)

    def _settle(self) -> None:
        """Write the step that is on its way."""
        if self._coming is None:
            return
        coming, self._coming = self._coming, None
        batch = coming.batch
        self._file.write(
            StepLine(
                step=coming.step,
                token_ids=coming.token_ids().tolist(),
                positions=batch.positions.tolist(),
                sequences=batch.sequence_rows.tolist(),
                logit_rows=batch.logit_rows.tolist(),
                groups=tuple(self._groups(coming)),
            )
        )
        self.num_written += 1

    def _groups(self, coming: _Coming) -> list[PointGroup]:
        kept, batch, words = self._points.of_plan[coming.tag], coming.batch, coming.words()
        rooms = {
            room: wait().reshape(-1, kept.rooms[room][1], kept.rooms[room][0].shape[1])
            for room, wait in coming.rooms.items()
        }
        there = [
            (alike, num_rows)
            for alike in self._alike[coming.tag]
            if (num_rows := len(batch.logit_rows if alike.is_of_logits else batch.token_ids))
        ]
        if not there:
            return []
        # All points at once: for few elements most of the time is around it.
        order = np.concatenate([alike.places for alike, _ in there])
        sizes = [num_rows * slot.width for alike, num_rows in there for slot in alike.slots]
        from hypocenter.device.cpu.measuring import figures_of_words  # numba

        figures, start, groups = figures_of_words(words[order], sizes), 0, []
        for alike, num_rows in there:
            stop, shape = start + len(alike.names), (num_rows, alike.slots[0].width)
            data = None
            if self._data_left >= 4 * (stop - start) * shape[0] * shape[1]:
                data = self._data(alike, shape, rooms, coming.logits)
            groups.append(_group(alike, shape, figures.some(start, stop), data))
            start = stop
        return groups

    def _data(
        self,
        alike: _Alike,
        shape: tuple[int, int],
        rooms: dict[int, Array],
        logits: Callable[[], Array] | None,
    ) -> bytes | None:
        """The elements of points, which count among those that may be written."""
        num_rows, width = shape
        found: list[Float32s] = []
        for slot in alike.slots:
            if slot.room is not None and slot.room[0] in rooms:
                room, place = slot.room
                found.append(rooms[room][place, :num_rows, :width])
            elif slot.name == "logits" and logits is not None:
                found.append(logits()[:, :width])
        if len(found) < len(alike.slots):
            return None
        data = np.stack(found).astype("<f4", copy=False).tobytes()
        self._data_left -= len(data)
        return data


def _no_words() -> Array:
    return np.zeros((0, 16), np.int64)


def _group(
    alike: _Alike, shape: tuple[int, int], found: ArrayFigures, data: bytes | None
) -> PointGroup:
    return PointGroup(
        names=alike.names,
        layers=alike.layers,
        shape=shape,
        dtype=alike.slots[0].dtype,
        digests=found.digests,
        low=found.low,  # type: ignore[arg-type]  # a list is written as a tuple is
        high=found.high,  # type: ignore[arg-type]
        mean=found.mean,  # type: ignore[arg-type]
        rms=found.rms,  # type: ignore[arg-type]
        num_nan=found.num_nan,  # type: ignore[arg-type]
        num_inf=found.num_inf,  # type: ignore[arg-type]
        sketches=found.sketches.tobytes(),
        data=data,
    )


def _alike_of(kept: KeptRooms) -> tuple[_Alike, ...]:
    """The points of a plan, those of one shape and type together."""
    kinds: dict[tuple[int, str, bool], list[int]] = {}
    for place, slot in enumerate(kept.slots):
        kinds.setdefault((slot.width, slot.dtype, slot.is_of_logits), []).append(place)
    return tuple(_of_places(kept.slots, places) for places in kinds.values())


def _of_places(slots: Sequence[PointSlot], places: list[int]) -> _Alike:
    of = tuple(slots[place] for place in places)
    names, layers = tuple(slot.name for slot in of), tuple(slot.layer for slot in of)
    return _Alike(names, layers, of, np.array(places))
