"""quantise: activations in the forms that matrix products read, made once per tensor.

Codes (for weights of block types): per group of 32 columns q = round(x * (127 / max|x|)), so x is
about q * scale with scale = max|x| / 127, and the sums of the codes of each half group. Pieces (on
a GPU, for F16 and BF16 weights): numbers of the weight's type whose sum is x, so that products are
exact. Rounded (on the CPU, for BF16 weights, where that is asked for): x as bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hypocenter.device.large_pages import LINE_BYTES
from hypocenter.device.memory import allocate, rows, stretch
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels import quantise_cpu
from hypocenter.kernels.contract import COUNT, Arg, Contract, Rule, Scalar, live_counts
from hypocenter.kernels.quant import Packed, padded
from hypocenter.tensor import DType, Tensor

#: Columns that share a scale.
GROUP = 32
#: Columns to a multiple of which GPU kernels find codes filled: a unit for each of 16 chains.
SPAN = 1024
#: Rows of a bucket up to which codes lie as the kernels for few rows read them.
FEW_ROWS = 8
#: Rows whose codes lie together, as CPU kernels read them, in buckets that have so many.
TILE_ROWS = 16
#: Rows of a bucket up to which codes change their place each turn, and the places at most.
_ROWS_WITH_PLACES, _MOST_PLACES = 4, 16
#: A group whose largest value is below this one is zero: 127 / max|x| would overflow before long.
TINY = 1e-30

_WIDTH = Scalar("width", "width > 0", "must be above 0")
_FITS = Rule("-(-width // 64) * 64 <= pitch", "a row of the result must hold it, padded to 64")
#: Where GPU kernels leave the codes of rows of `width` columns.
INTO_CODES = (
    Arg("codes", (DType.I32,), "num_rows, quarter", "write", fills="-(-width // 1024) * 256"),
    Arg("scales", (DType.F32,), "num_rows, quarter // 8", "write", fills="-(-width // 1024) * 32"),
    Arg("sums", (DType.I32,), "num_rows, quarter // 8", "write", fills="-(-width // 1024) * 32"),
    Rule("-(-width // 1024) * 256 <= quarter", "a row of codes must hold them, padded to 1024"),
)


def into_tiles(width: str, num_rows: str | None = None, prefix: str = "") -> tuple[Arg | Rule, ...]:
    """Where CPU kernels leave them, of rows and columns that a contract counts by these names: rows
    lie in tiles, of which there are as many as of what is read where no rows are counted."""
    groups = f"num_{prefix}groups"
    rows = Rule(f"num_tiles * tile >= {num_rows}", "the tiles of the result must hold the rows")
    return (
        Arg(f"{prefix}codes", (DType.I32,), f"num_tiles, {groups}, tile, 8", "write"),
        Arg(f"{prefix}scales", (DType.F32,), f"num_tiles, {groups}, tile", "write"),
        Arg(f"{prefix}sums", (DType.I32,), f"num_tiles, {groups}, 3, tile", "write"),
        Arg(f"{prefix}weighted", (DType.F32,), f"num_tiles, {groups}, 3, tile", "write"),
        *((rows,) if num_rows else ()),
        Rule(f"-(-{width} // 64) * 2 <= {groups}", "the groups of the result must hold a row"),
    )


INTO_TILES = into_tiles("width", "num_rows")
CODES = Contract(
    "quantise",
    Arg("x", (DType.F32,), "num_rows, >= width"),
    *INTO_CODES,
    live_counts("num_rows"),
    COUNT,
    _WIDTH,
)
TILES = Contract(
    "quantise",
    Arg("x", (DType.F32,), "num_rows, >= width"),
    *INTO_TILES,
    live_counts("num_rows"),
    COUNT,
    _WIDTH,
)
PIECES = Contract(
    "split",
    Arg("x", (DType.F32,), "num_rows, >= width"),
    Arg("pieces", (DType.F16, DType.I16), "num_rows, num_pieces, pitch", "write"),
    Arg("row_scales", (DType.F32,), "num_rows", "write"),
    live_counts("num_rows"),
    COUNT,
    _WIDTH,
    _FITS,
)
ROUNDED = Contract(
    "round",
    Arg("x", (DType.F32,), "num_rows, >= width"),
    Arg("rounded", (DType.BF16,), "num_rows, pitch", "write", fills="-(-width // 16) * 16"),
    live_counts("num_rows"),
    COUNT,
    _WIDTH,
    Rule("-(-width // 16) * 16 <= pitch", "a row of the result must hold it, padded to 16"),
)


@dataclass(frozen=True, slots=True)
class Operands:
    """Buffers for the codes of activations: made anew for each tensor, read by what follows.

    On a GPU codes i32 [max_rows, spans * 256], four columns to a word, in the order of columns
    where rows are many; where they are few, the words of a span, [16 units, 4, 4] of its columns,
    lie as [4, 16 units, 4], so that lanes of a warp, each with a unit of its own, read neighbours.
    Scales f32 and sums i32 [max_rows, spans * 32], two sums of 16 codes to a word; halves f16
    [max_rows, 2, pitch] and thirds (bits of bf16) i16 [max_rows, 3, pitch] with row_scales f32
    [max_rows].
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
    thirds: Tensor | None
    row_scales: Tensor | None
    rounded: Tensor | None

    @classmethod
    def allocate(
        cls, dtypes: Iterable[DType], max_rows: int, max_width: int, *, device: str,
        in_bf16: bool = False,
    ) -> Operands:  # fmt: skip
        """What products with weights of `dtypes` want; `in_bf16`: those of BF16 round x."""
        pitch, wanted = padded(max_width), set(dtypes)
        if device == "cpu":
            return cls._of_cpu(wanted, max_rows, pitch, in_bf16=in_bf16)
        quantised = any(dtype.is_quantised for dtype in wanted)
        num_spans = -(-max_width // SPAN)

        def make(name: str, dtype: DType, condition: bool, *shape: int) -> Tensor | None:
            if not condition:
                return None
            return allocate(name, "decoder", dtype, (max_rows, *shape), device=device)

        return cls(
            codes=make("x_codes", DType.I32, quantised, num_spans * (SPAN // 4)),
            scales=make("x_scales", DType.F32, quantised, num_spans * (SPAN // GROUP)),
            sums=make("x_sums", DType.I32, quantised, num_spans * (SPAN // GROUP)),
            weighted=None,
            halves=make("x_halves", DType.F16, DType.F16 in wanted, 2, pitch),
            thirds=make("x_thirds", DType.I16, DType.BF16 in wanted, 3, pitch),
            row_scales=make("x_row_scales", DType.F32, bool(wanted & {DType.F16, DType.BF16})),
            rounded=None,
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
            thirds=None,
            row_scales=None,
            rounded=make(
                "x_rounded", DType.BF16, in_bf16 and DType.BF16 in wanted, max_rows, pitch
            ),
        )

    def first(self, num_rows: int, turn: int = 0) -> Operands:
        """The same buffers for a bucket of `num_rows` rows.

        On the CPU codes of few rows lie elsewhere each turn, until the places are all used up. What
        was written last every thread has read since, and keeps: a core that writes there anew first
        has each line taken from the others, one after the other, and where these have another cache
        that takes longer than the work. In a place of some turns ago nobody keeps any.
        """

        def part(name: str) -> Tensor | None:
            one: Tensor | None = getattr(self, name)
            if one is None:
                return None
            is_tiled = self.weighted is not None and name in self.made
            return _tiled(one, num_rows, turn) if is_tiled else rows(one, 0, num_rows)

        return Operands(*(part(one.name) for one in fields(self)))

    @property
    def made(self) -> dict[str, Tensor | None]:
        """What holds the codes, by its names in contracts."""
        made = {"codes": self.codes, "scales": self.scales, "sums": self.sums}
        return made if self.weighted is None else made | {"weighted": self.weighted}

    def pieces(self, dtype: DType) -> Tensor | None:
        """The pieces for float weights of `dtype`; None for F32, which takes x itself."""
        return {DType.F16: self.halves, DType.BF16: self.thirds}.get(dtype)

    def multiplied_as(self, dtype: DType) -> DType:
        """What x is multiplied as by weights of `dtype`; pieces, whose sum is x, count as x."""
        if dtype.is_quantised:
            return DType.I8
        return DType.BF16 if dtype is DType.BF16 and self.rounded is not None else DType.F32


def operand_bytes(dtypes: Iterable[DType], max_rows: int, max_width: int, *, in_bf16: bool) -> int:
    """Bytes of the operands that products with weights of `dtypes` read on the CPU."""
    wanted, pitch = set(dtypes), padded(max_width)
    num_bytes = 2 * max_rows * pitch if in_bf16 and DType.BF16 in wanted else 0
    if any(dtype.is_quantised for dtype in wanted):
        per_group = TILE_ROWS * 4 * (8 + 1 + 3 + 3)
        num_bytes += -(-max_rows // TILE_ROWS) * (pitch // GROUP) * per_group
    return num_bytes


def _tiled(operand: Tensor, num_rows: int, turn: int) -> Tensor:
    """A part of a buffer [tiles, groups, ..., 16, ...] as tiles of fewer rows."""
    shape, tile = list(operand.shape), min(num_rows, TILE_ROWS)
    shape[shape.index(TILE_ROWS, 2)] = tile
    shape[0] = -(-num_rows // tile)
    # Whole cache lines: threads write to neighbouring places by turns.
    line = LINE_BYTES // 4
    pitch = -(-math.prod(shape) // line) * line
    num_places = min(max(operand.data.size // pitch, 1), _MOST_PLACES)
    place = turn % num_places if num_rows <= _ROWS_WITH_PLACES else 0
    return stretch(operand, tuple(shape), place * pitch)


def reads_codes_alone(weights: Iterable[Tensor]) -> bool:
    """Whether products with `weights` read nothing of x but its codes, in whichever order they lie.

    Then what makes x may make its codes, and x is never written.
    """
    return all(weight.dtype.is_quantised for weight in weights)


def quantise(
    plan: PlanBuilder, x: Tensor, width: int, into: Operands, counts: Tensor, *, count: int = 0
) -> None:
    """Append the codes of x f32 [num_rows, >= width]."""
    facts: dict[str, Any] = {"x": x, "counts": counts, "count": count, "width": width} | into.made
    if plan.device != "cpu":
        from hypocenter.kernels import quantise_gpu

        quantise_gpu.launch_codes(plan, CODES, facts)
        return
    plan.launch(
        quantise_cpu.quantise,
        *(x, counts, count, width, *into.made.values()),
        contract=TILES,
        facts=facts,
        work_per_row=4 * width,
    )


def _round(
    plan: PlanBuilder, x: Tensor, width: int, into: Operands, counts: Tensor, count: int
) -> None:
    facts: dict[str, Any] = {"x": x, "counts": counts, "count": count, "width": width}
    facts |= {"rounded": into.rounded}
    plan.launch(
        quantise_cpu.round_bf16,
        *(x, counts, count, width, into.rounded),
        contract=ROUNDED,
        facts=facts,
        work_per_row=width,
    )


def present(
    plan: PlanBuilder, x: Tensor, weights: Iterable[Tensor], into: Operands, counts: Tensor, *,
    count: int = 0,
) -> None:  # fmt: skip
    """Append what makes of x the operands that products with `weights` read.

    x f32 [num_rows, >= width], where width is the weights' number of columns. On the CPU float
    weights take x itself, or x rounded.
    """
    if plan.device == "cpu":
        kinds = {into.multiplied_as(one.dtype): one.data.num_columns for one in weights}
        if DType.I8 in kinds:
            quantise(plan, x, kinds[DType.I8], into, counts, count=count)
        if DType.BF16 in kinds:
            _round(plan, x, kinds[DType.BF16], into, counts, count)
        return
    from hypocenter.kernels import quantise_gpu

    found: dict[DType | None, Packed] = {}
    for weight in weights:
        found.setdefault(None if weight.dtype.is_quantised else weight.dtype, weight.data)
    for dtype, packed in found.items():
        width = packed.num_columns
        if dtype is None:
            quantise(plan, x, width, into, counts, count=count)
        elif dtype is not DType.F32:
            facts = {"x": x, "counts": counts, "count": count, "width": width}
            facts |= {"pieces": into.pieces(dtype), "row_scales": into.row_scales}
            quantise_gpu.launch_pieces(plan, PIECES, facts)


def reference(
    x: np.ndarray[Any, Any],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """x f32 [num_rows, k] as codes int8 [num_rows, k up to a multiple of 64], scales f32 and sums
    int32 (of half groups) per 32 and 16 columns: every bit as kernels give it.

    A group with a number that is not finite has codes 0 and the scale NaN.
    """
    num_rows, width = x.shape
    wide = np.zeros((num_rows, padded(width)), np.float32)
    wide[:, :width] = x
    groups = wide.reshape(num_rows, -1, GROUP)
    finite = np.abs(groups) < np.inf
    largest = np.where(finite, np.abs(groups), np.float32(np.inf)).max(axis=-1)
    usable = (largest >= np.float32(TINY)) & (largest < np.inf)
    safe = np.where(usable, largest, np.float32(1))
    inverse = np.where(usable, np.float32(127) / safe, np.float32(0))
    scales = np.where(usable, safe * np.float32(1 / 127), np.float32(0))
    scales = np.where(largest == np.inf, np.float32(np.nan), scales)
    values = np.where(finite, groups, np.float32(0)) * inverse[..., None]
    codes = np.rint(values).astype(np.int8)
    sums = codes.reshape(num_rows, -1, 16).sum(axis=-1, dtype=np.int32)
    return codes.reshape(wide.shape), scales, sums
