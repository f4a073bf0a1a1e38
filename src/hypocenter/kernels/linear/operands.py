"""What matrix products read: the buffers for activations made codes or rounded, and one product.

How they are filled is in `quantise.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.cpu.large_pages import LINE_BYTES
from hypocenter.device.memory import allocate, rows, stretch
from hypocenter.kernels.weights.row_groups import padded_rows

#: Columns that share a scale.
GROUP = 32


#: Columns to a multiple of which GPU kernels find rounded rows filled: the widest unit of weights.
SPAN = 128


#: Rows of a bucket up to which products with codes take x in fragments, on GPUs that read it so.
FEW_ROWS = 16


#: Rows whose codes lie together, as CPU kernels read them, in buckets that have so many.
TILE_ROWS = 16


#: Rows of a bucket up to which codes change their place each turn, and the places at most.
_ROWS_WITH_PLACES, _MOST_PLACES = 4, 16


@dataclass(frozen=True, slots=True)
class Operands:
    """Buffers for what products read of activations: made anew for each tensor, read by what
    follows.

    On a GPU halves f16 and bits (of bf16) i16 [max_rows, pitch], which are x but for a factor,
    row_scales f32 [max_rows]. Where rows are few, fragments f16 [rows, pitch] as well on NVIDIA's:
    halves whose columns lie as `round_kernel` says, so that a lane of a matrix unit reads 16 bytes.
    On the CPU rows lie in tiles of 16, or of a smaller bucket's rows, so that what a product reads
    lies close together: codes i32 [tiles, groups, tile, 8], scales f32 [tiles, groups, tile]; sums
    i32 [tiles, groups, 3, tile] of the first, the last and all codes of a group, and weighted f32,
    sum * scale. Rounded bf16 [max_rows, pitch].
    None: no weight wants it.
    """

    codes: Tensor | None
    scales: Tensor | None
    sums: Tensor | None
    weighted: Tensor | None
    halves: Tensor | None
    bits: Tensor | None
    row_scales: Tensor | None
    rounded: Tensor | None
    fragments: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        dtypes: Iterable[DType],
        max_rows: int,
        max_width: int,
        *,
        device: str,
        in_bf16: bool = False,
    ) -> Operands:
        """What products with weights of `dtypes` want; `in_bf16`: those of BF16 round x."""
        pitch, wanted = padded_rows(max_width), set(dtypes)
        if device == "cpu":
            return cls._of_cpu(wanted, max_rows, pitch, in_bf16=in_bf16)
        pitch = -(-max_width // SPAN) * SPAN
        quantised = any(dtype.is_quantised for dtype in wanted)
        has_halves = quantised or DType.F16 in wanted
        is_nvidia = device.startswith("cuda")

        def make(name: str, dtype: DType, condition: bool, *shape: int) -> Tensor | None:
            return allocate(name, "decoder", dtype, shape, device=device) if condition else None

        return cls(
            codes=None,
            scales=None,
            sums=None,
            weighted=None,
            halves=make("x_halves", DType.F16, has_halves, max_rows, pitch),
            bits=make("x_bits", DType.I16, DType.BF16 in wanted, max_rows, pitch),
            row_scales=make(
                "x_row_scales", DType.F32, has_halves or DType.BF16 in wanted, max_rows
            ),
            rounded=None,
            fragments=make(
                "x_fragments",
                DType.F16,
                quantised and is_nvidia,
                *(min(max_rows, FEW_ROWS), pitch),
            ),
        )

    @classmethod
    def _of_cpu(cls, wanted: set[DType], max_rows: int, pitch: int, *, in_bf16: bool) -> Operands:
        quantised = any(dtype.is_quantised for dtype in wanted)
        tiles = (-(-max_rows // TILE_ROWS), pitch // GROUP)

        def make(name: str, dtype: DType, condition: bool, *shape: int) -> Tensor | None:
            return allocate(name, "decoder", dtype, shape) if condition else None

        # `operand_bytes` counts them.
        return cls(
            codes=make("x_codes", DType.I32, quantised, *tiles, TILE_ROWS, 8),
            scales=make("x_scales", DType.F32, quantised, *tiles, TILE_ROWS),
            sums=make("x_sums", DType.I32, quantised, *tiles, 3, TILE_ROWS),
            weighted=make("x_weighted", DType.F32, quantised, *tiles, 3, TILE_ROWS),
            halves=None,
            bits=None,
            row_scales=None,
            rounded=make(
                "x_rounded", DType.BF16, in_bf16 and DType.BF16 in wanted, max_rows, pitch
            ),
        )

    def first(self, num_rows: int, turn: int = 0, tile: int = TILE_ROWS) -> Operands:
        """The same buffers for a bucket of `num_rows` rows; `tile`: the most of a tile, on the CPU.

        On the CPU codes of few rows lie elsewhere each turn, until the places are all used up. What
        was written last every thread has read since, and keeps: a core that writes there anew first
        has each line taken from the others, one after the other, and where these have another cache
        that takes longer than the work. In a place of some turns ago nobody keeps any.
        """

        def part(name: str) -> Tensor | None:
            buffer: Tensor | None = getattr(self, name)
            if buffer is None:
                return None
            is_tiled = self.weighted is not None and name in self.written
            if buffer is self.fragments and num_rows > FEW_ROWS:
                return None
            if is_tiled:
                return _as_tiles(buffer, num_rows, turn, tile)
            return rows(buffer, 0, num_rows)

        return Operands(*(part(field.name) for field in fields(self)))

    @property
    def written(self) -> dict[str, Tensor | None]:
        """Where kernels write codes or, on a GPU, halves of x, by the names in their contracts."""
        if self.weighted is None:
            written = {"rounded": self.halves, "row_scales": self.row_scales}
            return written | {"fragments": self.fragments}
        written = {"codes": self.codes, "scales": self.scales, "sums": self.sums}
        return written | {"weighted": self.weighted}

    @property
    def read(self) -> dict[str, Tensor | None]:
        """Where kernels read codes, by the names in their contracts."""
        read = {"codes": self.codes, "x_scales": self.scales, "sums": self.sums}
        return read | {"weighted": self.weighted}

    def rounded_for(self, dtype: DType) -> Tensor | None:
        """What GPU products with weights of `dtype` read; None for F32, which take x itself."""
        if dtype.is_quantised:
            return self.halves
        return {DType.F16: self.halves, DType.BF16: self.bits}.get(dtype)

    def multiplied_as(self, dtype: DType) -> DType:
        """What x is multiplied as by weights of `dtype`."""
        if self.rounded_for(dtype) is not None:
            return DType.F16 if dtype.is_quantised else dtype
        if dtype.is_quantised:
            return DType.I8
        return DType.BF16 if dtype is DType.BF16 and self.rounded is not None else DType.F32


def operand_bytes(dtypes: Iterable[DType], max_rows: int, max_width: int, *, in_bf16: bool) -> int:
    """Bytes of the operands that products with weights of `dtypes` read on the CPU."""
    wanted, pitch = set(dtypes), padded_rows(max_width)
    num_bytes = 2 * max_rows * pitch if in_bf16 and DType.BF16 in wanted else 0
    if any(dtype.is_quantised for dtype in wanted):
        per_group = TILE_ROWS * 4 * (8 + 1 + 3 + 3)
        num_bytes += -(-max_rows // TILE_ROWS) * (pitch // GROUP) * per_group
    return num_bytes


def _as_tiles(operand: Tensor, num_rows: int, turn: int, most: int) -> Tensor:
    """A part of a buffer [tiles, groups, ..., 16, ...] as tiles of fewer rows."""
    shape, tile = list(operand.shape), min(num_rows, most)
    shape[shape.index(TILE_ROWS, 2)] = tile
    shape[0] = -(-num_rows // tile)
    # Whole cache lines: threads write to neighbouring places by turns.
    line = LINE_BYTES // 4
    pitch = -(-math.prod(shape) // line) * line
    num_places = min(max(operand.data.size // pitch, 1), _MOST_PLACES)
    place = turn % num_places if num_rows <= _ROWS_WITH_PLACES else 0
    return stretch(operand, tuple(shape), place * pitch)


def reads_operands_alone(weights: Iterable[Tensor], device: str) -> bool:
    """Whether products with `weights` read nothing of x but its codes or, on a GPU, its halves.

    Then what makes x may make these, and x is never written.
    """
    halves = () if device == "cpu" else (DType.F16,)
    return all(weight.dtype.is_quantised or weight.dtype in halves for weight in weights)


@dataclass(frozen=True, slots=True)
class Product:
    """One weight packed [n, k], where its product goes, f32 [num_rows, >= n padded to 64], and a
    bias f32 [>= n padded to 64]."""

    weight: Tensor
    out: Tensor
    bias: Tensor | None = None
