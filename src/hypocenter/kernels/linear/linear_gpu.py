"""Launches of `linear` on a GPU: which kernel, for which number of rows, in what tiles.

The kernels are in `linear_codes_gpu.py`, `linear_codes_many_gpu.py` and `linear_float_gpu.py`.
Which one runs is decided by the bucket; the bits of a result are the same whichever it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.contract import Contract
from hypocenter.device.devices import has_wide_tiles
from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import triton
from hypocenter.kernels.linear.linear_codes_gpu import linear_codes_few_kernel
from hypocenter.kernels.linear.linear_codes_many_gpu import linear_codes_kernel
from hypocenter.kernels.linear.linear_float_gpu import linear_float_kernel
from hypocenter.kernels.linear.linear_forms import codes_form, few_codes_form, float_form
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
    if facts["weight"].dtype.is_quantised:
        _codes(plan, shared, products)
    else:
        _floats(plan, facts, products, shared)


def _one(product: Product) -> list[Any]:
    """What kernels take for a product: arrays, bias, out and its stride, and a factor of codes."""
    # A kernel without bias never reads the pointer; Triton wants one all the same.
    bias = product.out if product.bias is None else product.bias
    arrays, factor = product.weight.data.parts, []
    if product.weight.dtype.is_quantised:
        arrays, factor = arrays[:3], [float(arrays[4])]
    return [*arrays, bias, product.out, product.out.strides[0], *factor]


def _several(products: Sequence[Product]) -> list[Any]:
    """The same for as many as kernels for few rows take."""
    return [
        arg
        for product in [*products, *products[:1] * (_MOST - len(products))]
        for arg in _one(product)
    ]


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


def _codes(plan: PlanBuilder, shared: dict[str, Any], products: Sequence[Product]) -> None:
    facts, only = shared["facts"], products[0]
    fragments: Tensor | None = facts["fragments"]
    packed, count = only.weight.data, facts["count"]
    num_units = num_units_of(packed)
    rounded, row_scales, counts = facts["rounded"], facts["row_scales"], facts["counts"]
    num_rows, num_outputs = rounded.shape[0], sum(_tiles(products, 1))
    shared |= constants_of(packed)
    form = few_codes_form(num_rows, num_outputs, reads_fragments=fragments is not None)
    if form is None:
        form = codes_form(num_rows, num_outputs, plan.device)
        plan.add_gpu(
            linear_codes_kernel,
            *(rounded, row_scales, counts, *_one(only), count, num_units, rounded.strides[0]),
            grid=(triton.cdiv(num_rows, form.rows), *_tiles([only], form.outputs)),
            num_warps=form.num_warps,
            OUTPUTS=form.outputs,
            ROWS=form.rows,
            STAGES=form.stages,
            **shared,
        )
        return
    is_tight = shared["HAS_MINIMA"] and shared["GROUP"] == 32 and form.rows == 8
    if is_tight and plan.device.startswith("cuda") and not has_wide_tiles(plan.device):
        # The compiler would rather spill two than take more than 64.
        shared |= {"maxnreg": _MOST_REGISTERS}
    tiles = _tiles(products, form.outputs)
    x = rounded if fragments is None else fragments
    plan.add_gpu(
        linear_codes_few_kernel,
        *(x, row_scales, counts, *_several(products)),
        *(*[*tiles, 0][:2], count, num_units, x.strides[0]),
        grid=(sum(tiles),),
        num_warps=form.num_warps,
        NUM_WEIGHTS=len(products),
        IS_FRAGMENTS=fragments is not None,
        IS_EVEN=num_units % CHAINS == 0,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        STAGES=form.stages,
        **shared,
    )


def num_units_of(packed: Packed) -> int:
    """Units of a row of codes."""
    return -(-packed.num_columns // UNITS[packed.dtype].unit_columns)


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
    num_chunks = triton.cdiv(num_columns, 64)
    plan.add_gpu(
        linear_float_kernel,
        *(from_x, row_scales, facts["counts"], *_several(products)),
        *(*[*tiles, 0][:2], count, num_columns, num_chunks, from_x.strides[0]),
        grid=(sum(tiles), row_tiles) if form.rows <= 16 else (row_tiles, sum(tiles)),
        num_warps=form.num_warps,
        NUM_WEIGHTS=len(products),
        IS_ROUNDED=is_rounded,
        IS_BF16=weight.dtype is DType.BF16,
        OUTPUTS=form.outputs,
        ROWS=form.rows,
        CHUNKS=min(form.steps, triton.next_power_of_2(num_chunks)),
        STAGES=form.stages,
        **shared,
    )
