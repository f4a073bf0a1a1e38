"""Launches of `linear` on a GPU: which kernel, for which number of rows, in what tiles.

The kernels are in `linear_codes_gpu.py`, `linear_codes_many_gpu.py` and `linear_float_gpu.py`.
Which one runs is decided by the bucket; the bits of a result are the same whichever it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.devices import has_wide_tiles
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import triton
from hypocenter.kernels.linear.linear_codes_gpu import linear_codes_few_kernel
from hypocenter.kernels.linear.linear_codes_many_gpu import linear_codes_kernel
from hypocenter.kernels.linear.linear_float_gpu import linear_float_kernel
from hypocenter.kernels.linear.linear_forms import (
    codes_form,
    few_codes_form,
    float_form,
    units_asked,
)
from hypocenter.kernels.linear.operands import Product
from hypocenter.kernels.weights.gpu_layout import CHAINS, UNITS
from hypocenter.kernels.weights.packing import Packed
from hypocenter.kernels.weights.row_groups import padded_rows

#: Weights that the kernels for few rows take.
_MOST = 3
#: Of a thread of such a kernel, for eight rows and codes with minima on NVIDIA's smaller GPUs.
_MOST_REGISTERS = 80


def takes_several(num_rows: int, dtype: DType, device: str) -> bool:
    """Whether weights of one type share a launch in a bucket of `num_rows` rows."""
    if dtype.is_quantised:
        # Those of more rows keep a GPU busy alone.
        return num_rows <= 8 and device.startswith("cuda")
    # Each has stages of its own: for more there is no shared memory on AMD's GPUs, nor for more
    # rows on NVIDIA's smaller ones.
    return num_rows == 1 and device.startswith("cuda")


def _one(product: Product, mark: str = "") -> dict[str, Any]:
    """What kernels take for a product: arrays, bias, out and its stride, and a factor of codes."""
    parts = product.weight.data.parts
    arrays: dict[str, Any] = {f"weights{mark}_ptr": parts[0]}
    if product.weight.dtype.is_quantised:
        names = (f"{name}{mark}_ptr" for name in ("words", "scales", "minima"))
        arrays = dict(zip(names, parts[:3], strict=True)) | {f"factor{mark}": float(parts[4])}
    # A kernel without bias never reads the pointer; Triton wants one all the same.
    return arrays | {
        f"bias{mark}_ptr": product.bias or product.out,
        f"out{mark}_ptr": product.out,
        f"out{mark}_stride": product.out.strides[0],
    }


def _several(products: Sequence[Product]) -> dict[str, Any]:
    """The same for as many as kernels for few rows take."""
    padded = [*products, *products[:1] * (_MOST - len(products))]
    return {
        name: value
        for mark, product in zip(("", "_2", "_3"), padded, strict=True)
        for name, value in _one(product, mark).items()
    }


def _tiles(products: Sequence[Product], num_outputs: int) -> list[int]:
    """Programs of each product, each with `num_outputs` outputs."""
    return [padded_rows(product.weight.data.num_rows) // num_outputs for product in products]


def constants_of(packed: Packed) -> dict[str, Any]:
    """What kernels of codes are compiled for."""
    layout = UNITS[packed.dtype]
    return {
        "PER_WORD": layout.codes_per_word,
        "GROUP": layout.group,
        "ZERO": int(packed.parts[3]),
        "HAS_MINIMA": layout.has_minima,
    }


def launch_codes(
    plan: BoundPlan,
    products: Sequence[Product],
    rounded: Tensor,
    fragments: Tensor | None,
) -> None:
    """Append linear of weights held as codes, all or none with a bias, one unless it
    `takes_several`."""
    only = products[0]
    packed = only.weight.data
    num_units = num_units_of(packed)
    num_rows, num_outputs = rounded.shape[0], sum(_tiles(products, 1))
    constants = constants_of(packed)
    form = few_codes_form(num_rows, num_outputs, reads_fragments=fragments is not None)
    if form is None:
        form = codes_form(num_rows, num_outputs, plan.device)
        plan.add_gpu(
            linear_codes_kernel,
            grid=(triton.cdiv(num_rows, form.rows), *_tiles([only], form.outputs)),
            x_ptr=rounded,
            x_stride=rounded.strides[0],
            num_units=num_units,
            num_warps=form.num_warps,
            OUTPUTS=form.outputs,
            ROWS=form.rows,
            STAGES=form.stages,
            **_one(only),
            **constants,
        )
        return
    is_tight = constants["HAS_MINIMA"] and constants["GROUP"] == 32 and form.rows == 8
    if is_tight and plan.device.startswith("cuda") and not has_wide_tiles(plan.device):
        # The compiler would rather spill two than take more than 64.
        constants |= {"maxnreg": _MOST_REGISTERS}
    tiles = _tiles(products, form.outputs)
    x, units, stages = rounded, 1, form.stages
    if fragments is not None:
        x, chain_units = fragments, -(-num_units // CHAINS)
        units, stages = units_asked(packed.dtype, num_rows, num_outputs, chain_units, plan.device)
    plan.add_gpu(
        linear_codes_few_kernel,
        grid=(sum(tiles),),
        x_ptr=x,
        x_stride=x.strides[0],
        num_tiles=tiles[0],
        num_tiles_2=[*tiles, 0][1],
        num_units=num_units,
        num_warps=form.num_warps,
        NUM_WEIGHTS=len(products),
        IS_FRAGMENTS=fragments is not None,
        IS_EVEN=num_units % CHAINS == 0,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        STAGES=stages,
        UNITS=units,
        **_several(products),
        **constants,
    )


def num_units_of(packed: Packed) -> int:
    """Units of a row of codes."""
    return -(-packed.num_columns // UNITS[packed.dtype].unit_columns)


def launch_floats(
    plan: BoundPlan, products: Sequence[Product], accumulate: bool, x: Tensor
) -> None:
    """Append linear of F32 weights, all or none with a bias, one unless it `takes_several`."""
    _launch_floats(plan, products, accumulate, x, is_rounded=False, row_scales_ptr=x)


def launch_rounded(
    plan: BoundPlan, products: Sequence[Product], accumulate: bool, rounded: Tensor
) -> None:
    """Append linear of F16 or BF16 weights, which take x rounded; else as `launch_floats`."""
    _launch_floats(plan, products, accumulate, rounded, is_rounded=True)


def _launch_floats(
    plan: BoundPlan,
    products: Sequence[Product],
    accumulate: bool,
    from_x: Tensor,
    *,
    is_rounded: bool,
    **given: Any,
) -> None:
    weight = products[0].weight
    num_rows, num_columns = from_x.shape[0], weight.data.num_columns
    form = float_form(
        weight.dtype, num_rows, _tiles(products, 1), plan.device, accumulate=accumulate
    )
    tiles, row_tiles = _tiles(products, form.outputs), triton.cdiv(num_rows, form.rows)
    num_chunks = triton.cdiv(num_columns, 64)
    plan.add_gpu(
        linear_float_kernel,
        grid=(sum(tiles), row_tiles) if form.rows <= 16 else (row_tiles, sum(tiles)),
        x_ptr=from_x,
        x_stride=from_x.strides[0],
        num_tiles=tiles[0],
        num_tiles_2=[*tiles, 0][1],
        num_columns=num_columns,
        num_chunks=num_chunks,
        num_warps=form.num_warps,
        NUM_WEIGHTS=len(products),
        IS_ROUNDED=is_rounded,
        IS_BF16=weight.dtype is DType.BF16,
        ACCUMULATE=accumulate,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        CHUNKS=min(form.steps, triton.next_power_of_2(num_chunks)),
        STAGES=form.stages,
        **_several(products),
        **given,
    )
