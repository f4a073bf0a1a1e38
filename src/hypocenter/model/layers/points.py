"""Where a plan leaves what a trace asks for: launches that copy activations aside, and their room.

The launches before and behind them are those of a plan without a trace, so a step on any device
runs as it does otherwise. Nobody here computes figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hypocenter.base.errors import UsageError
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies
from hypocenter.device.memory import allocate, rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.rowwise.embedding import gather
from hypocenter.kernels.rowwise.layer_norm import layer_norm
from hypocenter.kernels.rowwise.norm import rms_norm
from hypocenter.model.facts.architecture import Architecture
from hypocenter.trace.points import OF_LOGIT_ROWS, Selection

#: Points that share an allocation, and with it a copy to the host.
_TOGETHER = 64
#: Bytes that the copies of all plans may take together.
_MAX_BYTES = 1 << 30


class Points:
    """What is kept where nothing is traced: nothing. Plans are as they are without it."""

    def begin(self, plan: PlanBuilder) -> None:
        """Begin a plan."""

    def wants(self, name: str, layer: int | None) -> bool:
        """Whether a point is kept, so that its tensor must be there."""
        return False

    def keep(
        self, plan: PlanBuilder, name: str, layer: int | None, x: Tensor, width: int = 0
    ) -> None:
        """Append a copy of the rows of x, of which the first `width` columns count (0: all)."""

    def keep_norm(
        self,
        plan: PlanBuilder,
        name: str,
        layer: int | None,
        normed: tuple[Tensor, Operands | None],
        x: Tensor,
        norm: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Append a copy of what `_norm` of x made; where that is codes alone, of x normed anew."""

    def keep_cache(self, layer: int, keys: Tensor, values: Tensor, value_dim: int) -> None:
        """Note the pages in which a step leaves keys and values of its tokens; these have so many
        columns a head, padding not counted."""


#: Keeps nothing.
NO_POINTS = Points()


@dataclass(frozen=True, slots=True)
class PointSlot:
    """A point of a plan: which row group of which piece of room it has, and its columns."""

    name: str
    layer: int | None
    room: int
    place: int
    width: int


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of a layer, and how many columns a head's values have."""

    layer: int
    keys: Tensor
    values: Tensor
    value_dim: int


@dataclass(slots=True)
class KeptRooms:
    """What one plan keeps: `rooms` f32 [_TOGETHER * rows, width], each with its rows of a point."""

    rooms: list[tuple[Tensor, int]] = field(default_factory=list)
    slots: list[PointSlot] = field(default_factory=list)
    pages: list[LayerPages] = field(default_factory=list)


class KeptPoints(Points):
    """The points that a trace asks for, in all plans that are made from now on."""

    def __init__(self, arch: Architecture, selection: Selection, counts: Tensor) -> None:
        """`counts` are those of a step."""
        self._arch, self._selection, self._counts = arch, selection, counts
        self._device = counts.device
        #: By the tag of a plan.
        self.of_plan: dict[int, KeptRooms] = {}
        self._num_bytes = 0
        self._open: dict[tuple[int, int], tuple[int, int]] = {}
        # Copies are of all rows of a bucket: what says how many are live is another matter.
        self._every_row: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, plan: PlanBuilder) -> None:
        self.of_plan[plan.tag] = KeptRooms()
        self._open = {}

    def wants(self, name: str, layer: int | None) -> bool:
        return self._selection.takes(name, layer)

    def keep(
        self, plan: PlanBuilder, name: str, layer: int | None, x: Tensor, width: int = 0
    ) -> None:
        if self.wants(name, layer):
            to = self._room(plan, name, layer, x, width or x.shape[1])
            every, counts = self._rows_of(x.shape[0])
            gather(plan, x, every, to, counts)

    def keep_norm(
        self,
        plan: PlanBuilder,
        name: str,
        layer: int | None,
        normed: tuple[Tensor, Operands | None],
        x: Tensor,
        norm: tuple[Tensor | None, Tensor | None],
    ) -> None:
        width, eps = self._arch.width, self._arch.norm_eps
        weight, bias = norm
        if normed[1] is None or weight is None:
            self.keep(plan, name, layer, normed[0], width)
        elif self.wants(name, layer):
            to, counts = self._room(plan, name, layer, x, width), self._counts
            count = int(name in OF_LOGIT_ROWS)
            if bias is None:
                rms_norm(plan, x, weight, eps, to, counts, width=width, count=count)
            else:
                layer_norm(plan, x, weight, bias, eps, to, counts, width=width, count=count)

    def keep_cache(self, layer: int, keys: Tensor, values: Tensor, value_dim: int) -> None:
        # Blocks of codes are no elements.
        if not keys.dtype.is_quantised:
            kept = next(reversed(self.of_plan.values()))
            kept.pages.append(LayerPages(layer, keys, values, value_dim))

    def _room(
        self, plan: PlanBuilder, name: str, layer: int | None, x: Tensor, width: int
    ) -> Tensor:
        """Room for the rows of x; raises UsageError where all plans together want too much."""
        kept = self.of_plan[plan.tag]
        num_rows, pitch = x.shape
        room, place = self._open.get((num_rows, pitch), (0, _TOGETHER))
        if place == _TOGETHER:
            self._num_bytes += 4 * _TOGETHER * num_rows * pitch
            if self._num_bytes > _MAX_BYTES:
                raise UsageError(
                    f"copies of all points of {num_rows} tokens take {self._num_bytes} bytes, and "
                    f"at most {_MAX_BYTES} are taken; name fewer --trace-points or "
                    "--trace-layers, or have smaller steps by --batch-size"
                )
            shape = (_TOGETHER * num_rows, pitch)
            room_tensor = allocate("kept", "trace", DType.F32, shape, device=self._device)
            kept.rooms.append((room_tensor, num_rows))
            room, place = len(kept.rooms) - 1, 0
        self._open[num_rows, pitch] = room, place + 1
        kept.slots.append(PointSlot(name, layer, room, place, width))
        return rows(kept.rooms[room][0], place * num_rows, (place + 1) * num_rows)

    def _rows_of(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """The indices of so many rows, and counts that say that all of them are live."""
        if num_rows not in self._every_row:
            every = allocate("rows", "trace", DType.I32, (num_rows,), device=self._device)
            copies.to_device(every, np.arange(num_rows, dtype=np.int32))
            counts = allocate("counts", "trace", DType.I32, (2,), device=self._device)
            copies.to_device(counts, np.full(2, num_rows, np.int32))
            self._every_row[num_rows] = every, counts
        return self._every_row[num_rows]
