"""After a step, the figures of what its plan kept, and a line of the trace for them.

Launches nothing: what is kept lies in room of the plan (`model/layers/points.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array, Float32s
from hypocenter.base.tensor import Tensor
from hypocenter.device import copies
from hypocenter.device.cpu.measuring import ArrayFigures, figures_of_groups
from hypocenter.device.plan import Plan
from hypocenter.engine.batch import Batch
from hypocenter.kernels.attention.kv_read import read_tokens_later
from hypocenter.model.layers.points import KeptPoints, KeptRooms, LayerPages
from hypocenter.trace.points import OF_LOGIT_ROWS, PointGroup, Selection, StepLine
from hypocenter.trace.writing import TraceFile


class _Copies(NamedTuple):
    """Points of one plan whose copies lie in one room: their names and layers, which part of
    [num_places, num_rows, pitch] they are, and how many places of the room are taken in all."""

    names: tuple[str, ...]
    layers: tuple[int | None, ...]
    room: int
    places: slice | list[int]
    width: int
    is_of_logits: bool
    num_places: int


class _PageGroup(NamedTuple):
    """Points of one plan that are read out of pages of one shape: keys or values of some layers."""

    name: str
    layers: tuple[int | None, ...]
    pages: tuple[LayerPages, ...]
    dtype: str


class _Held(NamedTuple):
    """Points f32 [num_points, num_rows, width] as they lie on the host."""

    names: tuple[str, ...]
    layers: tuple[int | None, ...]
    values: Float32s
    dtype: str


class StepTrace:
    """Writes what each step of a runner left at the points that were asked for."""

    def __init__(
        self, file: TraceFile, selection: Selection, points: KeptPoints, max_data_bytes: int
    ) -> None:
        """`max_data_bytes`: of the elements themselves so many are written, in order."""
        self._file, self._selection, self._points = file, selection, points
        self._data_left = max_data_bytes
        self._num_steps = self.num_written = 0
        self._copied: dict[int, list[_Copies]] = {}
        self._paged: dict[int, list[_PageGroup]] = {}

    def after(self, plan: Plan, batch: Batch, token_ids: Tensor) -> None:
        """Write the step that has just been launched; waits for it."""
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if not self._selection.takes_step(step):
            return
        kept, tag = self._points.of_plan[plan.tag], plan.tag
        if tag not in self._copied:
            self._copied[tag] = list(_kinds_of(kept))
            self._paged[tag] = list(_page_groups(kept.pages, self._selection))
        # All copies are asked for before the first is waited for.
        ids = copies.to_host_later(token_ids, len(batch.token_ids)) if batch.ids_on_device else None
        coming = [*self._of_copies(tag, kept, batch), *self._of_pages(tag, batch)]
        if len(batch.logit_rows) and self._selection.takes("logits", None):
            logits = copies.to_host_later(plan.result, len(batch.logit_rows))
            coming.append(lambda: _Held(("logits",), (None,), logits()[None], "F32"))
        held = [wait() for wait in coming]
        of_batch = batch.token_ids if ids is None else ids()
        self._file.write(
            StepLine(
                step=step,
                token_ids=of_batch.tolist(),
                positions=batch.positions.tolist(),
                sequences=batch.sequence_rows.tolist(),
                logit_rows=batch.logit_rows.tolist(),
                groups=tuple(self._groups(held)),
            )
        )
        self.num_written += 1

    @property
    def missing_steps(self) -> list[int]:
        """Steps that were asked for and have not come."""
        return [step for step in self._selection.steps or () if step >= self._num_steps]

    def close(self) -> None:
        self._file.close()

    def _of_copies(self, tag: int, kept: KeptRooms, batch: Batch) -> Iterator[Callable[[], _Held]]:
        """What launches of the plan copied aside."""
        on_way: dict[int, Callable[[], Array]] = {}
        for names, layers, room, places, width, is_of_logits, num_places in self._copied[tag]:
            num_rows = len(batch.logit_rows if is_of_logits else batch.token_ids)
            if not num_rows:
                continue
            tensor, most = kept.rooms[room]
            if room not in on_way:
                on_way[room] = functools.cache(copies.to_host_later(tensor, num_places * most))

            def wait_for(
                wait: Callable[[], Array] = on_way[room],
                shape: tuple[int, int] = (num_places, most),
                taken: Any = (places, slice(num_rows), slice(width)),
                of: tuple[Any, Any] = (names, layers),
            ) -> _Held:
                return _Held(*of, wait().reshape(*shape, -1)[taken], "F32")

            yield wait_for

    def _of_pages(self, tag: int, batch: Batch) -> Iterator[Callable[[], _Held]]:
        """What the step has left in the cache: of each token its keys, and its values."""
        for group in self._paged[tag]:
            waits = [
                read_tokens_later(
                    each.keys if group.name == "k_cache" else each.values,
                    batch.slots,
                    are_keys=group.name == "k_cache",
                    value_dim=each.value_dim,
                )
                for each in group.pages
            ]

            def wait_for(
                group: _PageGroup = group, waits: list[Callable[[], Float32s]] = waits
            ) -> _Held:
                values = np.stack([wait() for wait in waits])
                return _Held((group.name,) * len(waits), group.layers, values, group.dtype)

            yield wait_for

    def _groups(self, held: list[_Held]) -> Iterator[PointGroup]:
        if not held:
            return
        rows = [each.values.reshape(len(each.names), -1) for each in held]
        for each, figures in zip(held, figures_of_groups(rows), strict=True):
            yield self._group(each, figures)

    def _group(self, held: _Held, found: ArrayFigures) -> PointGroup:
        names, layers, values, dtype = held
        data = None
        if values.nbytes <= self._data_left:
            self._data_left -= values.nbytes
            data = np.ascontiguousarray(values, "<f4").tobytes()
        return PointGroup(
            names=names,
            layers=layers,
            shape=values.shape[1:],
            dtype=dtype,
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


def _kinds_of(kept: KeptRooms) -> Iterator[_Copies]:
    """The slots of a plan, those of one room and width together."""
    kinds = {(slot.room, slot.width, slot.name in OF_LOGIT_ROWS): None for slot in kept.slots}
    for room, width, is_of_logits in kinds:
        slots = [
            slot
            for slot in kept.slots
            if (slot.room, slot.width, slot.name in OF_LOGIT_ROWS) == (room, width, is_of_logits)
        ]
        places = [slot.place for slot in slots]
        names, layers = tuple(s.name for s in slots), tuple(s.layer for s in slots)
        first, last = places[0], places[-1]
        # A slice is no copy.
        is_whole = places == [*range(first, last + 1)]
        taken = slice(first, last + 1) if is_whole else places
        num_places = sum(slot.room == room for slot in kept.slots)
        yield _Copies(names, layers, room, taken, width, is_of_logits, num_places)


def _page_groups(pages: list[LayerPages], selection: Selection) -> Iterator[_PageGroup]:
    for name in ("k_cache", "v_cache"):
        by_shape: dict[tuple[Any, ...], list[LayerPages]] = {}
        for each in pages:
            if selection.takes(name, each.layer):
                by_shape.setdefault((each.keys.shape, each.keys.dtype), []).append(each)
        for of_shape in by_shape.values():
            layers = tuple(each.layer for each in of_shape)
            yield _PageGroup(name, layers, tuple(of_shape), of_shape[0].keys.dtype.name)
