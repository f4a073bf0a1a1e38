"""One tensor of a model as it is declared: its name, its shape, and what it becomes when loaded."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

from hypocenter.base.tensor import DType
from hypocenter.kernels.weights.cpu_layout import packed_bytes
from hypocenter.kernels.weights.row_groups import padded_rows

_F32_BYTES = 4


class TensorKind(enum.Enum):
    """What a tensor of a file is loaded as."""

    #: Packed in the file's type, and multiplied with activations.
    MATRIX = enum.auto()
    #: Packed in the file's type; its rows are looked up.
    TABLE = enum.auto()
    #: Packed in F32, whatever the file's type is.
    ROUTER = enum.auto()
    #: Vectors of f32, each padded with zeros to a multiple of 64.
    VECTOR = enum.auto()
    #: Rows of f32, each padded with zeros to a multiple of 64, which are looked up and added.
    ROWS = enum.auto()
    #: What the host makes of the few rows that stand for a text: as f32, on no device.
    HEAD = enum.auto()
    #: The factors of a convolution, f32 [num_taps, channels padded to 64].
    TAPS = enum.auto()
    #: A small matrix for each head, f16 or f32 [num_heads, inputs, outputs padded to 64].
    BY_HEAD = enum.auto()
    #: A number that launches are given.
    NUMBER = enum.auto()
    #: What divides the angles of rotations; tables are made of it.
    DIVISORS = enum.auto()
    #: A vector that the file lacks: one number, as often as it is needed.
    CONSTANT = enum.auto()


#: Those that are packed in the file's type, and may be lent to other processes.
PACKED = frozenset({TensorKind.MATRIX, TensorKind.TABLE})


class Loaded(NamedTuple):
    """What a tensor, or a part of it, becomes: its place among the weights (`dense.up`), and its
    shape without padding."""

    place: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: `name` and `shape` in the file (leading axes of 1 may be missing there), and the
    tensors that it is `loaded` as.

    `num_turns`: its rows are that many turns, each with an equal part of every one of `segments`;
    all of these but the last are loaded as one. `is_added_once`: of parts of a model only the first
    adds it. `over_root_of`: it is divided by the root of that number. `value`: of a constant.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorKind
    loaded: tuple[Loaded, ...] = ()
    is_optional: bool = False
    num_turns: int = 1
    segments: tuple[int, ...] = ()
    is_added_once: bool = False
    over_root_of: int = 1
    value: int = 0

    @property
    def is_cut_by_columns(self) -> bool:
        """Whether what it is loaded as lies side by side in its rows."""
        columns = [part.shape[-1] for part in self.loaded]
        return len(columns) > 1 and sum(columns) == self.shape[-1]

    def segments_along(self, axis: int) -> tuple[int, ...]:
        """Lengths of what lies one behind the other along an axis, counted from the last (-1)."""
        lengths = tuple(part.shape[axis] for part in self.loaded if len(part.shape) >= -axis)
        return lengths if sum(lengths) == self.shape[axis] else (self.shape[axis],)

    def num_bytes(self, dtype: DType) -> int:
        """What a tensor of that type takes on the CPU once it is loaded.

        Numbers by head of another type than F32 and BF16 are counted as f16, and are f32 where one
        is too large for that.
        """
        shapes = [part.shape for part in self.loaded]
        if self.kind in PACKED:
            return sum(packed_bytes(dtype, *shape) for shape in shapes)
        if self.kind is TensorKind.ROUTER:
            return sum(packed_bytes(DType.F32, *shape) for shape in shapes)
        num_numbers = sum(math.prod(padded_shape(shape)) for shape in shapes)
        is_half = self.kind is TensorKind.BY_HEAD and dtype not in (DType.F32, DType.BF16)
        return num_numbers * (_F32_BYTES // 2 if is_half else _F32_BYTES)


def padded_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same with the last axis padded to a multiple of 64."""
    return (*shape[:-1], padded_rows(shape[-1]))


def matrix(name: str, place: str, num_rows: int, num_columns: int) -> TensorSpec:
    """One matrix of the file that is loaded as one."""
    shape = (num_rows, num_columns)
    return TensorSpec(name, shape, TensorKind.MATRIX, (Loaded(place, shape),))


def matrices(
    name: str, row_counts: dict[str, int], num_columns: int, num_experts: int = 0
) -> TensorSpec:
    """Matrices that lie in one tensor one behind the other, by place; or stacks of them."""
    lead = (num_experts,) if num_experts else ()
    loaded = (Loaded(place, (*lead, count, num_columns)) for place, count in row_counts.items())
    shape = (*lead, sum(row_counts.values()), num_columns)
    return TensorSpec(name, shape, TensorKind.MATRIX, tuple(loaded))


def side_by_side(name: str, places: tuple[str, ...], num_rows: int, width: int) -> TensorSpec:
    """Matrices of `width` columns each, of which one tensor has all in each of its rows."""
    loaded = tuple(Loaded(place, (num_rows, width)) for place in places)
    return TensorSpec(name, (num_rows, len(places) * width), TensorKind.MATRIX, loaded)


def by_turns(
    name: str, places: tuple[str, str], segments: tuple[int, ...], num_columns: int, num_turns: int
) -> TensorSpec:
    """Two matrices of which one tensor has rows by turns: see `TensorSpec`."""
    counts = sum(segments[:-1]), segments[-1]
    loaded = (
        Loaded(place, (count, num_columns)) for place, count in zip(places, counts, strict=True)
    )
    shape = (sum(segments), num_columns)
    return TensorSpec(
        name, shape, TensorKind.MATRIX, tuple(loaded), num_turns=num_turns, segments=segments
    )


def vector(
    name: str,
    place: str,
    *shape: int,
    is_optional: bool = False,
    is_added_once: bool = False,
    over_root_of: int = 1,
) -> TensorSpec:
    """A tensor of any axes that is loaded as one vector."""
    return TensorSpec(
        name,
        shape,
        TensorKind.VECTOR,
        (Loaded(place, (math.prod(shape),)),),
        is_optional=is_optional,
        is_added_once=is_added_once,
        over_root_of=over_root_of,
    )


def constant(value: int, place: str, length: int) -> TensorSpec:
    """What a norm without a weight is multiplied by (1), or one without a bias adds (0)."""
    shape = (length,)
    return TensorSpec(
        f"norm of {value}", shape, TensorKind.CONSTANT, (Loaded(place, shape),), value=value
    )


def rows(name: str, place: str, num_rows: int, width: int) -> TensorSpec:
    """Rows that are added to activations."""
    shape = (num_rows, width)
    return TensorSpec(name, shape, TensorKind.ROWS, (Loaded(place, shape),))


def of_head(name: str, *shape: int) -> TensorSpec:
    """What the host multiplies or adds to rows that stand for texts."""
    return TensorSpec(name, shape, TensorKind.HEAD, (Loaded(name, shape),))


def taps(name: str, place: str, num_channels: int, num_taps: int) -> TensorSpec:
    """The factors of a convolution, which files hold by channel."""
    loaded = Loaded(place, (num_taps, num_channels))
    return TensorSpec(name, (num_channels, num_taps), TensorKind.TAPS, (loaded,))
