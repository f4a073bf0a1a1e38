"""Launches of `linear` on a GPU: which kernel, for which number of rows, in what tiles.

The kernels are in `linear_codes_gpu.py`, `linear_codes_many_gpu.py` and `linear_float_gpu.py`.
Which one runs is decided by the bucket; the bits of a result are the same whichever it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import triton
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.linear.linear_codes_gpu import linear_codes_few_kernel
from hypocenter.kernels.linear.linear_codes_many_gpu import (
    linear_codes_kernel,
    linear_codes_some_kernel,
)
from hypocenter.kernels.linear.linear_float_gpu import linear_float_kernel
from hypocenter.kernels.linear.linear_forms import float_form, many_codes_form, some_codes_form
from hypocenter.kernels.linear.operands import FEW_ROWS, Product
from hypocenter.kernels.weights.gpu_layout import UNITS
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.tensor import DType, Tensor

#: Weights that the kernels for few rows take.
_MOST = 3
#: Outputs of a launch up to which programs of two keep an H200 busier than programs of four, and
#: from which, of nibbles, there are enough programs of sixteen.
_FEW_OUTPUTS, _MANY_OUTPUTS = 4096, 24576


def takes_several(num_rows: int, dtype: DType, device: str) -> bool:
    """Whether weights of one type share a launch in a bucket of `num_rows` rows."""
    if dtype.is_quantised:
        # For four rows of codes of a byte NVIDIA's compiler finds too few registers.
        return num_rows <= (FEW_ROWS if UNITS[dtype].codes_per_word == 8 else 2)
    # Each has stages of its own: for more there is no shared memory on AMD's GPUs, nor for more
    # rows on NVIDIA's smaller ones.
    return num_rows == 1 and device.startswith("cuda")


def add(
    plan: PlanBuilder,
    contract: Contract,
    facts: Mapping[str, Any],
    products: Sequence[Product],
    accumulate: bool,
) -> None:
    """Append linear over the operands among `facts`, which hold what `products` do.

    These are of one type, all or none with a bias, and one unless it `takes_several`.
    """
    shared: dict[str, Any] = {
        "contract": contract,
        "facts": facts,
        "HAS_BIAS": facts["bias"] is not None,
        "ACCUMULATE": accumulate,
    }
    add_form = _codes if facts["weight"].dtype.is_quantised else _floats
    add_form(plan, facts, products, shared)


def _one(product: Product, num_arrays: int) -> list[Any]:
    """What kernels take for a product: arrays, bias, out."""
    # A kernel without bias never reads the pointer; Triton wants one all the same.
    bias = product.out if product.bias is None else product.bias
    return [*product.weight.data.parts[:num_arrays], bias, product.out]


def _several(products: Sequence[Product], num_arrays: int) -> list[Any]:
    """The same for as many as kernels for few rows take, each with its stride."""
    args: list[Any] = []
    for product in [*products, *products[:1] * (_MOST - len(products))]:
        args += [*_one(product, num_arrays), product.out.strides[0]]
    return args


def _tiles(products: Sequence[Product], num_outputs: int) -> list[int]:
    """Programs of each product, each with `num_outputs` outputs."""
    return [padded_rows(product.weight.data.num_rows) // num_outputs for product in products]


def _codes(
    plan: PlanBuilder,
    facts: Mapping[str, Any],
    products: Sequence[Product],
    shared: dict[str, Any],
) -> None:
    only, count = products[0], facts["count"]
    packed = only.weight.data
    num_units = -(-packed.num_columns // 64)
    layout = UNITS[packed.dtype]
    shared |= {
        "PER_WORD": layout.codes_per_word,
        "GROUP": layout.group,
        "ZERO": int(packed.parts[3]),
        "HAS_MINIMA": layout.has_minima,
        "SCALE_BITS": 8 * layout.scale_dtype.block_bytes,
    }
    if "spread" in facts:
        _many_codes(plan, facts, only, shared)
        return
    codes = facts["codes"]
    num_rows = codes.shape[0]
    operands = (codes, facts["x_scales"], facts["sums"], facts["counts"])
    if num_rows > FEW_ROWS:
        form = some_codes_form(packed.dtype, num_rows, plan.device)
        plan.add_gpu(
            linear_codes_some_kernel,
            *(*operands, *_one(only, 3), count, num_units, codes.strides[0], only.out.strides[0]),
            grid=(*_tiles([only], form.outputs), triton.cdiv(num_rows, form.rows)),
            num_warps=form.num_warps,
            OUTPUTS=form.outputs,
            ROWS=form.rows,
            STAGES=form.stages,
            **shared,
        )
        return
    rows = min(triton.next_power_of_2(max(num_rows, 1)), 4)
    outputs, num_warps, unroll = _few_form(products, rows, plan.device)
    tiles = _tiles(products, outputs)
    plan.add_gpu(
        linear_codes_few_kernel,
        *(*operands, *_several(products, 3)),
        *(*[*tiles, 0][:2], count, num_units, codes.strides[0]),
        grid=(sum(tiles), triton.cdiv(num_rows, rows)),
        num_warps=num_warps,
        NUM_WEIGHTS=len(products),
        ROWS=rows,
        OUTPUTS=outputs,
        UNROLL=unroll,
        **shared,
    )


def _many_codes(
    plan: PlanBuilder, facts: Mapping[str, Any], only: Product, shared: dict[str, Any]
) -> None:
    spread, row_scales, row_sums = facts["spread"], facts["row_scales"], facts.get("row_sums")
    num_rows, packed = spread.shape[0], only.weight.data
    form = many_codes_form(packed.dtype, num_rows, packed.num_rows, plan.device)
    num_units = -(-packed.num_columns // 64)
    plan.add_gpu(
        linear_codes_kernel,
        # Without sums the pointer is never read.
        *(spread, row_scales, row_scales if row_sums is None else row_sums, facts["counts"]),
        *(*_one(only, 3), facts["count"], num_units, triton.cdiv(num_units, 16)),
        *(spread.strides[0], 0 if row_sums is None else row_sums.strides[0]),
        only.out.strides[0],
        grid=(triton.cdiv(num_rows, form.rows), *_tiles([only], form.outputs)),
        num_warps=form.num_warps,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        STAGES=form.stages,
        **shared,
    )


def _few_form(products: Sequence[Product], rows: int, device: str) -> tuple[int, int, int]:
    """Outputs, warps and unrolled steps of a program for few rows of codes.

    Small ones are up to twice as fast on an H200; RDNA has no registers for them.
    """
    if not device.startswith("cuda"):
        return 16, 8, 1
    if rows > 1:
        return 8, 2, 1
    layout, num_outputs = UNITS[products[0].weight.dtype], sum(_tiles(products, 1))
    are_nibbles = layout.codes_per_word == 8
    # Minima and shorter groups would not leave registers enough on all of NVIDIA's GPUs.
    is_plain = are_nibbles and layout.group == 32 and not layout.has_minima
    if num_outputs >= _MANY_OUTPUTS and is_plain:
        return 16, 1, 1
    # Bytes fill registers twice as fast, and several weights of Q6_K those of older GPUs.
    is_short = layout.group == 16 and len(products) > 1
    if num_outputs <= _FEW_OUTPUTS:
        return 2, 1, 1 if is_short else 2
    return 4, 1, 2 if are_nibbles and not is_short else 1


def _floats(
    plan: PlanBuilder,
    facts: Mapping[str, Any],
    products: Sequence[Product],
    shared: dict[str, Any],
) -> None:
    count, weight = facts["count"], products[0].weight
    # F32 weights take x as it is.
    is_rounded = "rounded" in facts
    from_x: Tensor = facts["rounded"] if is_rounded else facts["x"]
    row_scales = facts["row_scales"] if is_rounded else from_x
    num_rows, num_columns = from_x.shape[0], weight.data.num_columns
    form = float_form(
        weight.dtype,
        num_rows,
        _tiles(products, 1),
        plan.device,
        accumulate=shared["ACCUMULATE"],
    )
    tiles, row_tiles = _tiles(products, form.outputs), triton.cdiv(num_rows, form.rows)
    plan.add_gpu(
        linear_float_kernel,
        *(from_x, row_scales, facts["counts"], *_several(products, 1)),
        *(*[*tiles, 0][:2], count, num_columns, triton.cdiv(num_columns, 64), from_x.strides[0]),
        grid=(sum(tiles), row_tiles) if form.rows <= 16 else (row_tiles, sum(tiles)),
        num_warps=form.num_warps,
        NUM_WEIGHTS=len(products),
        IS_ROUNDED=is_rounded,
        IS_BF16=weight.dtype is DType.BF16,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        CHUNKS=form.steps,
        STAGES=form.stages,
        **shared,
    )
