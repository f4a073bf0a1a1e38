"""Where a plan leaves what a trace asks for: launches that measure activations, and their room.

The launches before and behind them are those of a plan without a trace, so a step on any device
runs as it does otherwise. Where elements are asked for, launches copy them aside as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hypocenter.base.errors import UsageError
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies
from hypocenter.device.digests import NUM_WORDS
from hypocenter.device.memory import allocate, rows
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention.kv_read import kv_read
from hypocenter.kernels.linear.operands import Operands
from hypocenter.kernels.rowwise.embedding import gather
from hypocenter.kernels.rowwise.figures import (
    MAX_PARTS,
    MAX_TENSORS,
    join_figures,
    measure,
    num_parts_of,
)
from hypocenter.kernels.rowwise.layer_norm import layer_norm
from hypocenter.kernels.rowwise.norm import rms_norm
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.layers.step_buffers import StepInputs
from hypocenter.trace.points import AFTER_LAYERS, BEFORE_LAYERS, OF_LAYERS, OF_LOGIT_ROWS, Selection

#: Points whose copies share an allocation, and with it a copy to the host.
_TOGETHER = 64
#: Bytes that what all plans keep may take together.
MAX_BYTES = 1 << 30


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
        """Keep what x holds, of whose columns the first `width` count (0: all). It must hold that
        until `measure` comes, which appends the launch."""

    def measure(self, plan: PlanBuilder) -> None:
        """Append the launch that measures what was kept and not measured yet: the tensors are about
        to be written again."""

    def keep_norm(
        self,
        plan: PlanBuilder,
        name: str,
        layer: int | None,
        normed: tuple[Tensor, Operands | None],
        x: Tensor,
        norm: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Keep what `_norm` of x made; where that is codes alone, x is normed anew."""

    def keep_cache(
        self, plan: PlanBuilder, layer: int, caches: tuple[Tensor, Tensor], value_dim: int
    ) -> None:
        """Keep what a step left in pages of keys and values for its tokens; values have so many
        columns a head, padding not counted."""

    def finish(self, plan: PlanBuilder, result: Tensor | None = None) -> None:
        """End a plan, and keep its result as logits where it has some."""


#: Keeps nothing.
NO_POINTS = Points()


@dataclass(frozen=True, slots=True)
class PointSlot:
    """A point of a plan: its columns, the type that its tensor has in memory, and where its
    elements are copied to: which piece of room and which rows of it, or None."""

    name: str
    layer: int | None
    width: int
    dtype: str
    room: tuple[int, int] | None

    @property
    def is_of_logits(self) -> bool:
        return self.name in OF_LOGIT_ROWS


@dataclass(slots=True)
class KeptRooms:
    """What one plan keeps, with a slot for each of its points in the order of `figures` i64
    [>= num_points, NUM_WORDS]. `rooms` f32 [_TOGETHER * rows, width] have copies of elements, each
    with its rows of a point."""

    figures: Tensor
    slots: list[PointSlot] = field(default_factory=list)
    rooms: list[tuple[Tensor, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that is to be measured."""

    x: Tensor
    width: int
    count: int


class KeptPoints(Points):
    """The points that a trace asks for, in all plans that are made from now on."""

    def __init__(
        self,
        arch: Architecture,
        selection: Selection,
        inputs: StepInputs,
        *,
        keeps_data: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`keeps_data`: elements are kept, not figures alone. What all plans keep takes at most
        `max_bytes`."""
        self._arch, self._selection, self._inputs = arch, selection, inputs
        self._counts, self._keeps_data = inputs.counts, keeps_data
        self._num_bytes, self._max_bytes = 0, max_bytes
        self._device = inputs.counts.device
        #: By the tag of a plan.
        self.of_plan: dict[int, KeptRooms] = {}
        # Of the plan that is being made: parts of all points, and where those of each begin.
        self._parts: Tensor | None = None
        self._firsts: list[int] = []
        self._waiting: list[_Kept] = []
        self._open: dict[tuple[int, int], tuple[int, int]] = {}
        # Copies are of all rows of a bucket: what says how many are live is another matter.
        self._every_row: dict[int, tuple[Tensor, Tensor]] = {}
        # What a point is computed into that is nowhere otherwise; plans use it in turn.
        self._scratch: dict[tuple[str, int, int], Tensor] = {}

    def begin(self, plan: PlanBuilder) -> None:
        layers, ends = self._arch.num_layers, len(BEFORE_LAYERS) + len(AFTER_LAYERS)
        num_points = sum(self.wants(name, layer) for layer in range(layers) for name in OF_LAYERS)
        num_points += ends
        # Those of logits, which are wider, are measured by themselves.
        each = num_parts_of(plan.num_rows, self._widest())
        num_parts = num_points * each + ends * MAX_PARTS
        figures = self._allocate("figures", DType.I64, (num_points, NUM_WORDS))
        self._parts = self._allocate("parts", DType.I64, (num_parts, NUM_WORDS))
        self._firsts, self._waiting, self._open = [0], [], {}
        self.of_plan[plan.tag] = KeptRooms(figures)

    def wants(self, name: str, layer: int | None) -> bool:
        return self._selection.takes(name, layer)

    def keep(
        self, plan: PlanBuilder, name: str, layer: int | None, x: Tensor, width: int = 0
    ) -> None:
        if self.wants(name, layer):
            self._keep(plan, name, layer, x, width or x.shape[1])

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
            to, counts = self._room_for(name, x.shape[0], x.shape[1]), self._counts
            count = int(name in OF_LOGIT_ROWS)
            if bias is None:
                rms_norm(plan, x, weight, eps, to, counts, width=width, count=count)
            else:
                layer_norm(plan, x, weight, bias, eps, to, counts, width=width, count=count)
            self._keep(plan, name, layer, to, width)

    def keep_cache(
        self, plan: PlanBuilder, layer: int, caches: tuple[Tensor, Tensor], value_dim: int
    ) -> None:
        keys, _ = caches
        is_wanted = self.wants("k_cache", layer) or self.wants("v_cache", layer)
        # Blocks of codes are no elements.
        if keys.dtype.is_quantised or not is_wanted:
            return
        num_rows, heads = plan.num_rows, keys.shape[1]
        widths = heads * keys.shape[2], heads * value_dim
        k, v = (
            self._room_for(name, num_rows, padded_rows(width))
            for name, width in zip(("k_cache", "v_cache"), widths, strict=True)
        )
        kv_read(plan, caches, self._inputs.slots, k, v, self._counts, value_dim=value_dim)
        for name, x, width in (("k_cache", k, widths[0]), ("v_cache", v, widths[1])):
            if self.wants(name, layer):
                self._keep(plan, name, layer, x, width, keys.dtype.name)

    def measure(self, plan: PlanBuilder) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        assert self._parts is not None
        x, count = waiting[0].x, waiting[0].count
        num_parts = num_parts_of(x.shape[0], max(kept.width for kept in waiting))
        first = self._firsts[-1]
        self._firsts += [first + num_parts * (i + 1) for i in range(len(waiting))]
        parts = rows(self._parts, first, self._firsts[-1])
        tensors = [(kept.x, kept.width) for kept in waiting]
        measure(plan, tensors, parts, self._counts, count=count)

    def finish(self, plan: PlanBuilder, result: Tensor | None = None) -> None:
        if result is not None:
            self.keep(plan, "logits", None, result)
        self.measure(plan)
        kept = self.of_plan[plan.tag]
        if not kept.slots:
            return
        assert self._parts is not None
        firsts = allocate("firsts", "trace", DType.I32, (len(self._firsts),), device=self._device)
        copies.to_device(firsts, np.array(self._firsts, np.int32))
        figures = rows(kept.figures, 0, len(kept.slots))
        join_figures(plan, self._parts, firsts, figures)

    def _keep(
        self,
        plan: PlanBuilder,
        name: str,
        layer: int | None,
        x: Tensor,
        width: int,
        dtype: str = "F32",
    ) -> None:
        kept, count = self.of_plan[plan.tag], int(name in OF_LOGIT_ROWS)
        if self._waiting:
            of = self._waiting[0]
            is_alike = (of.x.shape[0], of.count) == (x.shape[0], count)
            if not is_alike or len(self._waiting) == MAX_TENSORS:
                self.measure(plan)
        self._waiting.append(_Kept(x, width, count))
        # Logits are copied from where the step leaves them.
        is_copied = self._keeps_data and name != "logits"
        room = self._copy(plan, kept, x) if is_copied else None
        kept.slots.append(PointSlot(name, layer, width, dtype, room))

    def _copy(self, plan: PlanBuilder, kept: KeptRooms, x: Tensor) -> tuple[int, int]:
        """Append a copy of the rows of x; where it goes to."""
        num_rows, pitch = x.shape
        room, place = self._open.get((num_rows, pitch), (0, _TOGETHER))
        if place == _TOGETHER:
            shape = (_TOGETHER * num_rows, pitch)
            kept.rooms.append((self._allocate("kept", DType.F32, shape), num_rows))
            room, place = len(kept.rooms) - 1, 0
        self._open[num_rows, pitch] = room, place + 1
        to = rows(kept.rooms[room][0], place * num_rows, (place + 1) * num_rows)
        every, counts = self._rows_of(num_rows)
        gather(plan, x, every, to, counts)
        return room, place

    def _widest(self) -> int:
        """The most columns of a point that is not of logit rows."""
        arch = self._arch
        return max(padded_rows(arch.width), arch.widest_q, arch.widest_kv, arch.widest_attended)

    def _room_for(self, name: str, num_rows: int, pitch: int) -> Tensor:
        key = name, num_rows, pitch
        if key not in self._scratch:
            self._scratch[key] = self._allocate(name, DType.F32, (num_rows, pitch))
        return self._scratch[key]

    def _allocate(self, name: str, dtype: DType, shape: tuple[int, int]) -> Tensor:
        """Raises UsageError where all plans together want too much."""
        self._num_bytes += dtype.num_bytes(shape[0] * shape[1])
        if self._num_bytes > self._max_bytes:
            raise UsageError(
                f"all points keep {self._num_bytes} bytes, and at most {self._max_bytes} are "
                "taken; name fewer --trace-points or --trace-layers, leave out --trace-data, or "
                "have smaller steps by --batch-size"
            )
        return allocate(name, "trace", dtype, shape, device=self._device)

    def _rows_of(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """The indices of so many rows, and counts that say that all of them are live."""
        if num_rows not in self._every_row:
            every = allocate("rows", "trace", DType.I32, (num_rows,), device=self._device)
            copies.to_device(every, np.arange(num_rows, dtype=np.int32))
            counts = allocate("counts", "trace", DType.I32, (2,), device=self._device)
            copies.to_device(counts, np.full(2, num_rows, np.int32))
            self._every_row[num_rows] = every, counts
        return self._every_row[num_rows]
