"""The static buffers by which a step's tokens find their experts; computes nothing itself.

Each token takes `num_used` experts. The rows of activations that experts read are sorted by
expert: row r is token `sources[r]`, and choice j of token t is row `places[t, j]`. A group is some
rows of one expert, one behind the other; products go through groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.copies import to_device
from hypocenter.device.memory import allocate, rows
from hypocenter.kernels.linear.operands import FEW_ROWS, TILE_ROWS

#: Tokens of a bucket from which so many rows of an expert are common that they fill tiles.
_MANY_TOKENS = 64
#: On a GPU, rows of a group as products take them: of few tokens, of more, and of more than
#: `_MORE_TOKENS`.
_FEW_ROWS, _MORE_ROWS, _MOST_ROWS = 4, 16, 32
_MORE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """How many tokens, experts and choices of each token there are in a bucket, and where.

    `num_rows` bounds the sorted rows: on the CPU an expert's begin at a multiple of `alignment`.
    `group_rows` bounds those of a group; 0: it has all rows of its expert.
    """

    num_tokens: int
    num_experts: int
    num_used: int
    device: str

    @property
    def num_choices(self) -> int:
        return self.num_tokens * self.num_used

    @property
    def alignment(self) -> int:
        """Rows to a multiple of which an expert's begin.

        CPU kernels take rows by 16, by 4 or one by one; what is skipped is computed in vain.
        """
        if self.device != "cpu" or self.num_tokens < 4:
            return 1
        return 4 if self.num_tokens < _MANY_TOKENS else TILE_ROWS

    @property
    def tile(self) -> int:
        """Rows whose codes lie together, on the CPU."""
        return 1 if self.alignment == 1 else TILE_ROWS

    @property
    def group_rows(self) -> int:
        if self.device == "cpu":
            return 0
        if self.is_few:
            return min(1 << (self.num_tokens - 1).bit_length(), _FEW_ROWS)
        return _MORE_ROWS if self.num_tokens <= _MORE_TOKENS else _MOST_ROWS

    @property
    def is_few(self) -> bool:
        """Whether products on a GPU take the sorted rows as few, and codes lie so."""
        return self.num_choices <= FEW_ROWS

    @property
    def num_rows(self) -> int:
        most = min(self.num_experts, self.num_choices)
        aligned = self.num_choices + most * (self.alignment - 1)
        return -(-aligned // self.alignment) * self.alignment

    @property
    def num_groups(self) -> int:
        if self.device == "cpu":
            return min(self.num_experts, self.num_choices)
        if self.is_few:
            return self.num_choices
        return self.num_choices // self.group_rows + self.num_experts

    def of(self, num_tokens: int) -> ExpertsShape:
        """The same for a smaller bucket."""
        return ExpertsShape(num_tokens, self.num_experts, self.num_used, self.device)

    @property
    def most_groups(self) -> int:
        """The most that `num_groups` gives for any bucket up to this one."""
        few = max(FEW_ROWS // self.num_used, 1)
        sizes = {min(self.num_tokens, most) for most in (few, _MORE_TOKENS, self.num_tokens)}
        return max(self.of(size).num_groups for size in sizes)


@dataclass(frozen=True, slots=True)
class ExpertsTable:
    """ids i32 [num_tokens, num_used]: the experts of each token, best first; weights f32
    [num_tokens, num_used + 1]: what each counts, and last what the shared expert does.

    experts, firsts, sizes i32 [num_groups]: the expert of each group, its first sorted row and
    its rows (0: none is left); sources i32 [num_rows]; places i32 [num_tokens, num_used]; counts
    i32 [2]: the sorted rows, twice, for kernels that take either; num_groups i32 [1]; ends i32
    [num_experts] is scratch. `is_fixed`: all but ids and weights is known before the step, so that
    `group` has nothing to find.
    """

    shape: ExpertsShape
    ids: Tensor
    weights: Tensor
    experts: Tensor
    firsts: Tensor
    sizes: Tensor
    sources: Tensor
    places: Tensor
    counts: Tensor
    num_groups: Tensor
    ends: Tensor
    is_fixed: bool = False

    @classmethod
    def allocate(cls, shape: ExpertsShape) -> ExpertsTable:
        def make(name: str, *sizes: int, dtype: DType = DType.I32) -> Tensor:
            return allocate(f"expert_{name}", "decoder", dtype, sizes, device=shape.device)

        return cls(
            shape=shape,
            ids=make("ids", shape.num_tokens, shape.num_used),
            weights=make("weights", shape.num_tokens, shape.num_used + 1, dtype=DType.F32),
            experts=make("groups", shape.most_groups),
            firsts=make("firsts", shape.most_groups),
            sizes=make("sizes", shape.most_groups),
            sources=make("sources", shape.num_rows),
            places=make("places", shape.num_tokens, shape.num_used),
            counts=make("counts", 2),
            num_groups=make("num_groups", 1),
            ends=make("ends", shape.num_experts),
        )

    def first(self, num_tokens: int) -> ExpertsTable:
        """The same buffers for a bucket of `num_tokens` tokens."""
        shape = self.shape.of(num_tokens)
        return ExpertsTable(
            shape=shape,
            ids=rows(self.ids, 0, num_tokens),
            weights=rows(self.weights, 0, num_tokens),
            experts=rows(self.experts, 0, shape.num_groups),
            firsts=rows(self.firsts, 0, shape.num_groups),
            sizes=rows(self.sizes, 0, shape.num_groups),
            sources=rows(self.sources, 0, shape.num_rows),
            places=rows(self.places, 0, num_tokens),
            counts=self.counts,
            num_groups=self.num_groups,
            ends=self.ends,
        )

    def of_one_token(self) -> ExpertsTable:
        """The table of a bucket of one token on a GPU: each choice is a group, in its own order.

        Its fixed parts are buffers of their own; experts are the ids themselves.
        """
        shape = self.shape.of(1)
        num_used = shape.num_used

        def fill(name: str, values: list[int], *sizes: int) -> Tensor:
            table = allocate(f"expert_{name}", "decoder", DType.I32, sizes, device=shape.device)
            to_device(table, np.array(values, np.int32).reshape(sizes))
            return table

        ids, order = rows(self.ids, 0, 1), list(range(num_used))
        return ExpertsTable(
            shape=shape,
            ids=ids,
            weights=rows(self.weights, 0, 1),
            experts=replace(ids, shape=(num_used,), strides=(1,)),
            firsts=fill("firsts", order, num_used),
            sizes=fill("sizes", [1] * num_used, num_used),
            sources=fill("sources", [0] * num_used, num_used),
            places=fill("places", order, 1, num_used),
            counts=fill("counts", [num_used] * 2, 2),
            num_groups=fill("num_groups", [num_used], 1),
            ends=self.ends,
            is_fixed=True,
        )
