"""After a step, the figures of what its plan kept, and a line of the trace for them.

Launches nothing: what is kept lies in room of the plan (`model/layers/points.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hypocenter.base.dtypes import Float32s
from hypocenter.base.tensor import Tensor
from hypocenter.device import copies
from hypocenter.device.cpu.measuring import figures_of
from hypocenter.device.plan import Plan
from hypocenter.engine.batch import Batch
from hypocenter.kernels.attention.kv_read import read_tokens
from hypocenter.model.layers.points import KeptPoints, KeptRooms, LayerPages
from hypocenter.trace.points import OF_LOGIT_ROWS, PointGroup, Selection, StepLine
from hypocenter.trace.writing import TraceFile


class _Copies(NamedTuple):
    """Points of one plan whose copies lie in one room: their names and layers, and which part of
    [num_places, num_rows, pitch] they are."""

    names: tuple[str, ...]
    layers: tuple[int | None, ...]
    room: int
    places: slice | list[int]
    width: int
    is_of_logits: bool


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

    def after(self, plan: Plan, batch: Batch, token_ids: Tensor) -> None:
        """Write the step that has just been launched; waits for it."""
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if not self._selection.takes_step(step):
            return
        ids = batch.token_ids
        if batch.ids_on_device:
            ids = copies.to_host(token_ids, len(ids))
        kept = self._points.of_plan[plan.tag]
        groups = [
            *self._of_copies(plan.tag, kept, batch),
            *self._of_pages(kept.pages, batch),
        ]
        if len(batch.logit_rows) and self._selection.takes("logits", None):
            logits = copies.to_host(plan.result, len(batch.logit_rows))[None]
            groups.append(self._group(("logits",), (None,), logits))
        self._file.write(
            StepLine(
                step=step,
                token_ids=ids.tolist(),
                positions=batch.positions.tolist(),
                sequences=batch.sequence_rows.tolist(),
                logit_rows=batch.logit_rows.tolist(),
                groups=tuple(groups),
            )
        )
        self.num_written += 1

    @property
    def missing_steps(self) -> list[int]:
        """Steps that were asked for and have not come."""
        return [step for step in self._selection.steps or () if step >= self._num_steps]

    def close(self) -> None:
        self._file.close()

    def _of_copies(self, tag: int, kept: KeptRooms, batch: Batch) -> Iterator[PointGroup]:
        """What launches of the plan copied aside."""
        if tag not in self._copied:
            self._copied[tag] = list(_kinds_of(kept))
        on_host: dict[int, Float32s] = {}
        for names, layers, room, places, width, is_of_logits in self._copied[tag]:
            num_rows = len(batch.logit_rows if is_of_logits else batch.token_ids)
            if not num_rows:
                continue
            tensor, most = kept.rooms[room]
            if room not in on_host:
                num_places = sum(slot.room == room for slot in kept.slots)
                held = copies.to_host(tensor, num_places * most)
                on_host[room] = held.reshape(num_places, most, -1)
            yield self._group(names, layers, on_host[room][places, :num_rows, :width])

    def _of_pages(self, pages: list[LayerPages], batch: Batch) -> Iterator[PointGroup]:
        """What the step has left in the cache: of each token its keys, and its values."""
        for name in ("k_cache", "v_cache"):
            by_shape: dict[tuple[Any, ...], list[LayerPages]] = {}
            for each in pages:
                if self._selection.takes(name, each.layer):
                    by_shape.setdefault((each.keys.shape, each.keys.dtype), []).append(each)
            for of_shape in by_shape.values():
                layers = tuple(each.layer for each in of_shape)
                values = np.stack([_tokens_of(name, each, batch) for each in of_shape])
                dtype = of_shape[0].keys.dtype.name
                yield self._group((name,) * len(layers), layers, values, dtype)

    def _group(
        self,
        names: tuple[str, ...],
        layers: tuple[int | None, ...],
        values: Float32s,
        dtype: str = "F32",
    ) -> PointGroup:
        """The points of `values` f32 [num_points, num_rows, width]."""
        found = figures_of(values.reshape(len(names), -1))
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
        yield _Copies(names, layers, room, taken, width, is_of_logits)


def _tokens_of(name: str, pages: LayerPages, batch: Batch) -> Float32s:
    are_keys = name == "k_cache"
    held = pages.keys if are_keys else pages.values
    return read_tokens(held, batch.slots, are_keys=are_keys, value_dim=pages.value_dim)
