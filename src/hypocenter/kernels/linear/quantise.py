"""quantise: activations in the forms that matrix products read, made once per tensor.

Codes (for weights of block types, on the CPU): per group of 32 columns q = round(x * (1 / scale)),
so x is about q * scale, and the sums of the codes of each half group. The scale is max|x| / 127,
rounded up to four bits that count. Rounded: x as numbers of the weight's type, on a GPU for F16,
BF16 and, as f16, block types, on the CPU for BF16 weights where that is asked for. For f16 a power
of two first makes each row large, so that small numbers keep their bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.contracts.demands import COUNT, Arg, Index, Rule, Scalar, live_counts, live_rows
from hypocenter.device.op import Op
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.linear.operands import GROUP, Operands, reads_operands_alone
from hypocenter.kernels.rowwise.embedding import gather
from hypocenter.kernels.weights.packing import Packed
from hypocenter.kernels.weights.row_groups import padded_rows

#: A group whose largest value is below this one is zero: 127 / max|x| would overflow before long.
TINY = 1e-30

_WIDTH = Scalar("width", "width > 0", "must be above 0")


def into_rounded(num_rows: str, width: str) -> tuple[Arg | Rule, ...]:
    """Where GPU kernels leave rounded rows, of rows and columns that a contract counts so; and
    again in the order of fragments, where rows are few."""
    whole = f"-(-({width}) // 128) * 128"

    def result(name: str, *dtypes: DType, optional: bool = False) -> Arg:
        size = f"{num_rows}, pitch"
        return Arg(name, dtypes, size, "write", fills=whole, optional=optional)

    return (
        result("rounded", DType.F16, DType.I16),
        Arg("row_scales", (DType.F32,), num_rows, "write"),
        result("fragments", DType.F16, optional=True),
        Rule(f"{whole} <= pitch", "a row of the result must hold it, padded to 128"),
    )


INTO_ROUNDED = into_rounded("num_rows", "width")


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
    *INTO_ROUNDED,
    live_counts("num_rows"),
    COUNT,
    _WIDTH,
)

#: On a GPU, of rows that lie elsewhere.
GATHERED = Contract(
    "gather_round",
    Arg("x", (DType.F32,), "num_tokens, >= width"),
    *INTO_ROUNDED,
    Arg(
        "sources",
        (DType.I32,),
        ">= num_rows",
        index=Index("num_tokens", "the activations", live=live_rows("sources", 0)),
    ),
    live_counts("num_rows", 0),
    _WIDTH,
)

_QUANTISE = Op(
    TILES,
    gpu_contract=SCALED,
    cpu="linear.quantise_cpu.quantise",
    gpu="linear.quantise_gpu.launch",
    work_per_row=lambda width: 4 * width,
    gpu_alone=("is_plain",),
)
_ROUND = Op(ROUNDED, cpu="linear.quantise_cpu.round_bf16", work_per_row=lambda width: width)
_GATHER_ROUND = Op(GATHERED, gpu="linear.quantise_gpu.launch_gathered")


def quantise(
    plan: PlanBuilder,
    x: Tensor,
    width: int,
    into: Operands,
    counts: Tensor,
    *,
    count: int = 0,
    is_plain: bool = False,
) -> None:
    """Append the codes of x f32 [num_rows, >= width] or, on a GPU, its halves; `is_plain`: these
    are x itself, which is known to have room in f16."""
    plan.add(
        _QUANTISE, x=x, counts=counts, count=count, width=width, is_plain=is_plain, **into.written
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
            width = kinds[DType.BF16]
            plan.add(_ROUND, x=x, counts=counts, count=count, width=width, rounded=into.rounded)
        return
    found: dict[DType, Packed] = {}
    for weight in weights:
        found.setdefault(into.multiplied_as(weight.dtype), weight.data)
    in_bf16 = {"rounded": into.bits, "row_scales": into.row_scales, "fragments": None}
    for dtype, packed in found.items():
        if dtype in (DType.F16, DType.BF16):
            written = into.written if dtype is DType.F16 else in_bf16
            width = packed.num_columns
            plan.add(
                _QUANTISE, x=x, counts=counts, count=count, width=width, is_plain=False, **written
            )


def gather_operands(
    plan: PlanBuilder,
    x: Tensor,
    sources: Tensor,
    weights: Collection[Tensor],
    into: Operands,
    counts: Tensor,
    out: Tensor,
) -> None:
    """Append what makes of x[sources] the operands that products with `weights` read.

    x f32 [num_tokens, >= width], sources i32 [>= num_rows], live by counts[0], which counts[1]
    equals. out f32 [num_rows, as wide as x] holds the rows themselves afterwards where these are
    read as well, and else nothing. The result has the bits of `gather` and `prepare_operands`.
    """
    if plan.device == "cpu" or not reads_operands_alone(weights, plan.device):
        gather(plan, x, sources, out, counts)
        prepare_operands(plan, out, weights, into, counts, count=1)
        return
    width = next(iter(weights)).data.num_columns
    plan.add(_GATHER_ROUND, x=x, sources=sources, counts=counts, width=width, **into.written)


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
    """x f32 [num_rows, k] as GPU products with F16 or BF16 weights take it, in float64; those with
    weights of block types take it as those with F16.

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
