"""quantise: activations in the forms that matrix products read, made once per tensor.

Codes (for weights of block types): per group of 32 columns q = round(x * (1 / scale)), so x is
about q * scale, and the sums of the codes of each half group. The scale is max|x| / 127, rounded up
to four bits that count: code times scale then fits f16, so that matrix units of floats can add
codes without an error (`spread_gpu.py`). Codes are at most an eighth coarser for it. Rounded: x as
numbers of the weight's type, on a GPU for F16 and BF16 weights, on the CPU for BF16 weights where
that is asked for. For f16 a power of two first makes each row large, so that small numbers keep
their bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.demands import COUNT, Arg, Reach, Rule, Scalar, Symbols, live_counts
from hypocenter.kernels.linear import quantise_cpu
from hypocenter.kernels.linear.operands import GROUP, Operands
from hypocenter.kernels.weights.packing import Packed
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.tensor import DType, Tensor

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
ROUNDED = Contract(
    "round",
    Arg("x", (DType.F32,), "num_rows, >= width"),
    Arg("rounded", (DType.BF16,), "num_rows, pitch", "write", fills="-(-width // 16) * 16"),
    live_counts("num_rows"),
    COUNT,
    _WIDTH,
    Rule("-(-width // 16) * 16 <= pitch", "a row of the result must hold it, padded to 16"),
)
SCALED = Contract(
    "round",
    Arg("x", (DType.F32,), "num_rows, >= width"),
    Arg(
        "rounded",
        (DType.F16, DType.I16),
        "num_rows, pitch",
        "write",
        fills="-(-width // 64) * 64",
    ),
    Arg("row_scales", (DType.F32,), "num_rows", "write"),
    live_counts("num_rows"),
    COUNT,
    _WIDTH,
    _FITS,
)


def _live_sums(values: Symbols) -> np.ndarray[Any, Any]:
    """Of tiles of 64 rows, each [sums, 64], those of live rows up to their width."""
    num_tiles, num_sums = values["num_tiles"], values["num_sums"]
    row = np.arange(num_tiles * 64).reshape(num_tiles, 1, 64)
    is_there: np.ndarray[Any, Any] = np.arange(num_sums)[:, None] < -(-values["width"] // 64) * 6
    mask: np.ndarray[Any, Any] = (row < values["counts"][values["count"]]) & is_there
    return mask


_SPREAD = (
    Arg("codes", (DType.I32,), "num_rows, quarter"),
    Arg("scales", (DType.F32,), "num_rows, quarter // 8"),
    Arg("sums", (DType.I32,), "num_rows, quarter // 8"),
    Rule("-(-width // 1024) * 256 <= quarter", "codes must hold a row, padded to 1024"),
    Arg("spread", (DType.F16,), "num_rows, pitch", "write", fills="-(-width // 64) * 64"),
    Arg("row_scales", (DType.F32,), "num_rows", "write"),
    live_counts("num_rows"),
    COUNT,
    _WIDTH,
    _FITS,
)
SPREAD = Contract("spread", *_SPREAD)
SPREAD_SUMS = Contract(
    "spread",
    *_SPREAD,
    Arg(
        "row_sums",
        (DType.F32,),
        "num_tiles, num_sums, 64",
        "write",
        reach=Reach("three for each group of live rows", _live_sums),
    ),
    Rule("num_tiles * 64 >= num_rows", "the tiles of sums must hold the rows"),
    Rule("-(-width // 64) * 6 <= num_sums", "the sums must be three for each group of a row"),
)


def quantise(
    plan: PlanBuilder, x: Tensor, width: int, into: Operands, counts: Tensor, *, count: int = 0
) -> None:
    """Append the codes of x f32 [num_rows, >= width]."""
    facts: dict[str, Any] = {"x": x, "counts": counts, "count": count, "width": width} | into.made
    if plan.device != "cpu":
        from hypocenter.kernels.linear import quantise_gpu

        quantise_gpu.add_codes(plan, CODES, facts)
        return
    plan.add_cpu(
        quantise_cpu.quantise,
        *(x, counts, count, width, *into.made.values()),
        contract=TILES,
        facts=facts,
        work_per_row=4 * width,
    )


def spread(
    plan: PlanBuilder,
    of: Operands,
    width: int,
    counts: Tensor,
    *,
    count: int = 0,
    with_sums: bool = False,
) -> None:
    """Append code times scale as f16 of rows of `width` columns, whose codes a GPU has made.

    `with_sums`: and the sums of codes times scale, which weights with minima ask for.
    """
    from hypocenter.kernels.linear import spread_gpu

    facts: dict[str, Any] = {
        "codes": of.codes,
        "scales": of.scales,
        "sums": of.sums,
        "spread": of.spread,
        "row_scales": of.spread_scales,
        "counts": counts,
        "count": count,
        "width": width,
    }
    if with_sums:
        facts["row_sums"] = of.spread_sums
    spread_gpu.add(plan, SPREAD_SUMS if with_sums else SPREAD, facts)


def _round(
    plan: PlanBuilder, x: Tensor, width: int, into: Operands, counts: Tensor, count: int
) -> None:
    facts: dict[str, Any] = {"x": x, "counts": counts, "count": count, "width": width}
    facts |= {"rounded": into.rounded}
    plan.add_cpu(
        quantise_cpu.round_bf16,
        *(x, counts, count, width, into.rounded),
        contract=ROUNDED,
        facts=facts,
        work_per_row=width,
    )


def prepare_operands(
    plan: PlanBuilder,
    x: Tensor,
    weights: Iterable[Tensor],
    into: Operands,
    counts: Tensor,
    *,
    count: int = 0,
) -> None:
    """Append what makes of x the operands that products with `weights` read.

    x f32 [num_rows, >= width], where width is the weights' number of columns. On the CPU float
    weights take x itself, or x rounded.
    """
    if plan.device == "cpu":
        kinds = {into.multiplied_as(weight.dtype): weight.data.num_columns for weight in weights}
        if DType.I8 in kinds:
            quantise(plan, x, kinds[DType.I8], into, counts, count=count)
        if DType.BF16 in kinds:
            _round(plan, x, kinds[DType.BF16], into, counts, count)
        return
    from hypocenter.kernels.linear import quantise_gpu

    found: dict[DType | None, Packed] = {}
    for weight in weights:
        found.setdefault(None if weight.dtype.is_quantised else weight.dtype, weight.data)
    for dtype, packed in found.items():
        width = packed.num_columns
        if dtype is None:
            quantise(plan, x, width, into, counts, count=count)
        elif dtype is not DType.F32:
            facts = {"x": x, "counts": counts, "count": count, "width": width}
            facts |= {"rounded": into.rounded_for(dtype), "row_scales": into.row_scales}
            quantise_gpu.add_rounded(plan, SCALED, facts)


def reference(
    x: np.ndarray[Any, Any],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """x f32 [num_rows, k] as codes int8 [num_rows, k up to a multiple of 64], scales f32 and sums
    int32 (of half groups) per 32 and 16 columns: every bit as kernels give it.

    A group with a number that is not finite has codes 0 and the scale NaN.
    """
    num_rows, width = x.shape
    wide = np.zeros((num_rows, padded_rows(width)), np.float32)
    wide[:, :width] = x
    groups = wide.reshape(num_rows, -1, GROUP)
    finite = np.abs(groups) < np.inf
    largest = np.where(finite, np.abs(groups), np.float32(np.inf)).max(axis=-1)
    usable = (largest >= np.float32(TINY)) & (largest < np.inf)
    safe = np.where(usable, largest, np.float32(1))
    bits = (safe * np.float32(1 / 127)).view(np.int32)
    safe = ((bits + np.int32(0xFFFFF)) & np.int32(-0x100000)).view(np.float32)
    inverse = np.where(usable, np.float32(1) / safe, np.float32(0))
    scales = np.where(usable, safe, np.float32(0))
    scales = np.where(largest == np.inf, np.float32(np.nan), scales)
    values = np.where(finite, groups, np.float32(0)) * inverse[..., None]
    codes = np.rint(values).astype(np.int8)
    sums = codes.reshape(num_rows, -1, 16).sum(axis=-1, dtype=np.int32)
    return codes.reshape(wide.shape), scales, sums


def reference_rounded(x: np.ndarray[Any, Any], dtype: DType) -> np.ndarray[Any, Any]:
    """x f32 [num_rows, k] as GPU products with F16 or BF16 weights take it, in float64.

    As f16 a row's largest number lies in 2**14 .. 2**15, times a power of two.
    """
    if dtype is DType.BF16:
        words = x.view(np.uint32)
        nearest = (words + 0x7FFF + (words >> 16 & 1)) & np.uint32(0xFFFF0000)
        return nearest.astype(np.uint32).view(np.float32).astype(np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True)
    up = np.exp2(14 - np.floor(np.log2(np.where(largest > 0, largest, 1))).astype(np.float64))
    rounded: np.ndarray[Any, Any] = (x * up).astype(np.float16) / up
    return rounded
