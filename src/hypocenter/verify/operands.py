"""Activations as products read them, codes in tiles or rounded rows: as float64, and how far off.

The layouts are those of `kernels/linear/operands.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType, Tensor
from hypocenter.kernels.linear.operands import GROUP, Operands
from hypocenter.kernels.linear.quantise import TINY
from hypocenter.verify.bounds import EPS, EPS_F16, TINY_F16

#: What contracts call the parts of tiles where they are read, where they are written, and where a
#: gate's are.
_TILES = {
    "read": ("codes", "x_scales", "sums", "weighted"),
    "written": ("codes", "scales", "sums", "weighted"),
    "gated": ("gated_codes", "gated_scales", "gated_sums", "gated_weighted"),
}
#: Bits of bf16 are a row's numbers without a factor; half a step of them is a share of 2**-9.
_EPS_BF16 = 2.0**-9


def kind_of(names: Collection[str]) -> str:
    """Which operands an op has among arguments of these names: `read`, `rounded`, or ""."""
    if "x_scales" in names:
        return "read"
    return "rounded" if "rounded" in names else ""


def buffers_of(arguments: Mapping[str, Any]) -> Operands:
    """The buffers that an op reads, as `quantise` takes them to fill."""
    found: dict[str, Tensor | None] = dict.fromkeys(
        ("codes", "scales", "sums", "weighted", "halves", "bits", "row_scales", "rounded")
    )
    if "x_scales" in arguments:
        names = ("codes", "scales", "sums", "weighted")
        found |= dict(zip(names, (arguments[n] for n in _TILES["read"]), strict=True))
    elif arguments["rounded"].device == "cpu":
        found["rounded"] = arguments["rounded"]
    else:
        found["row_scales"] = arguments["row_scales"]
        is_f16 = arguments["rounded"].dtype is DType.F16
        found["halves" if is_f16 else "bits"] = arguments["rounded"]
    return Operands(**found, fragments=arguments.get("fragments"))


@dataclass(frozen=True, slots=True)
class OperandRows:
    """Rows of operands: their numbers f64 [num_rows, width], how far each may be from what it was
    made of, and what of the parts does not belong together ("" where all does)."""

    values: Array
    half_steps: Array
    disagree: str = ""


def tiles(values: Mapping[str, Array], names: str, num_rows: int, width: int) -> OperandRows:
    """Rows of codes in tiles; `names`: one of the keys of _TILES."""
    codes, scales, sums, weighted = (values[name] for name in _TILES[names])
    num_tiles, num_groups, tile, _ = codes.shape
    flat = np.ascontiguousarray(codes).view(np.int8).reshape(num_tiles, num_groups, tile, GROUP)
    by_row = flat.transpose(0, 2, 1, 3).reshape(num_tiles * tile, num_groups, GROUP)[:num_rows]
    num_live = -(-width // GROUP)
    by_row = by_row[:, :num_live].astype(np.float64)
    of_rows = scales.transpose(0, 2, 1).reshape(-1, num_groups)[:num_rows, :num_live]
    numbers = by_row * of_rows[..., None].astype(np.float64)
    # Half a step, and what the quotient and its reciprocal are rounded by.
    off = np.abs(of_rows[..., None]) * (0.5 + 256 * EPS) + np.zeros_like(numbers) + TINY
    halves = by_row.reshape(num_rows, num_live, 2, 16).sum(axis=3)
    wanted = np.stack([halves[..., 0], halves[..., 1], halves.sum(axis=2)], axis=-1)
    found, product = (
        part.transpose(0, 3, 1, 2).reshape(-1, num_groups, 3)[:num_rows, :num_live]
        for part in (sums, weighted)
    )
    disagree = ""
    if not np.array_equal(found, wanted):
        disagree = "sums are not those of the codes"
    elif not np.array_equal(product, (wanted * of_rows[..., None]).astype(np.float32)):
        disagree = "weighted sums are not sum * scale"
    shape = (num_rows, num_live * GROUP)
    return OperandRows(numbers.reshape(shape)[:, :width], off.reshape(shape)[:, :width], disagree)


def scale_limits(exact: Array, off: Array) -> tuple[Array, Array]:
    """The least and the largest scale of each group that rows f64 [num_rows, width] may have."""
    num_rows, width = exact.shape
    wide = np.zeros((2, num_rows, -(-width // GROUP) * GROUP))
    wide[0, :, :width], wide[1, :, :width] = np.abs(exact), off
    sizes, offs = wide.reshape(2, num_rows, -1, GROUP)
    largest, spare = sizes.max(axis=2), offs.max(axis=2)
    # Of four bits that count, the next one up is an eighth more at most.
    low = np.maximum(largest - spare, 0) / 127 * (1 - 8 * EPS)
    return np.where(low * 127 < 2 * TINY, 0, low), (largest + spare) / 127 * 1.125 * (1 + 8 * EPS)


def scales_of_tiles(values: Mapping[str, Array], names: str, num_rows: int, width: int) -> Array:
    """The scales of tiles by row, f32 [num_rows, num_groups]."""
    scales = values[_TILES[names][1]]
    by_row = scales.transpose(0, 2, 1).reshape(-1, scales.shape[1])
    found: Array = by_row[:num_rows, : -(-width // GROUP)]
    return found


def half_rows(values: Mapping[str, Array], dtype: DType, num_rows: int, width: int) -> OperandRows:
    """Rows that are rounded, times their scales; `dtype` is that of the tensor."""
    bits = values["rounded"][:num_rows, :width]
    if dtype is DType.F16:
        down = values["row_scales"][:num_rows, None].astype(np.float64)
        numbers = bits.view(np.float16).astype(np.float64) * down
        off = np.abs(numbers) * EPS_F16 * (1 + EPS_F16) + TINY_F16 * down
        return OperandRows(numbers, off, _fragment_problem(values, num_rows))
    if dtype is DType.I16:
        bits = bits.view(np.uint16)
    numbers = (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return OperandRows(numbers, np.abs(numbers) * _EPS_BF16 * (1 + _EPS_BF16) + 2.0**-50)


def _fragment_problem(values: Mapping[str, Array], num_rows: int) -> str:
    """Whether fragments, where there are any, hold other numbers than the rows do."""
    fragments = values.get("fragments")
    if fragments is None:
        return ""
    width = fragments.shape[1]
    item, other = (
        np.sort(part[:num_rows, :width].reshape(num_rows, -1, 32), axis=2)
        for part in (fragments, values["rounded"])
    )
    return "" if np.array_equal(item, other) else "fragments are not the rounded row's numbers"
