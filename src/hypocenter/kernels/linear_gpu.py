"""Launches of `linear` on a GPU: which kernel, for which number of rows, in what tiles.

The kernels are in `linear_codes_gpu.py` and `linear_float_gpu.py`. Which one runs is decided by the
bucket; the bits of a result are the same whichever it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.gpu_lang import triton
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.linear_codes_gpu import linear_codes_few_kernel, linear_codes_kernel
from hypocenter.kernels.linear_float_gpu import linear_float_few_kernel, linear_float_kernel
from hypocenter.kernels.quant import LANES, Packed, padded
from hypocenter.kernels.quant_units import UNITS
from hypocenter.tensor import DType, Tensor

#: Rows of a bucket up to which the kernels for few rows win (measured on an H200).
_FEW_CODES, _FEW_FLOATS = 8, 32


def launch(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], count: int, accumulate: bool
) -> None:
    """Append linear over the operands among `facts`, which hold x."""
    weight, bias = facts["weight"], facts["bias"]
    # A kernel without bias never reads the pointer; Triton wants one all the same.
    some_bias = facts["x"] if bias is None else bias
    shared: dict[str, Any] = {
        "contract": contract,
        "facts": facts,
        "HAS_BIAS": bias is not None,
        "ACCUMULATE": accumulate,
    }
    (_codes if weight.dtype.is_quantised else _floats)(plan, facts, some_bias, count, shared)


def _codes(
    plan: PlanBuilder, facts: Mapping[str, Any], bias: Any, count: int, shared: dict[str, Any]
) -> None:
    out, codes, packed = facts["out"], facts["codes"], facts["weight"].data
    num_rows, num_outputs = codes.shape[0], padded(packed.num_rows)
    num_units = -(-packed.num_columns // 64)
    words, scales, minima, zero = packed.parts
    layout = UNITS[packed.dtype]
    before = (codes, facts["x_scales"], facts["sums"], facts["counts"])
    arrays = (*before, words, scales, minima, bias, out, count, num_units)
    strides = (codes.strides[0], out.strides[0])
    shared |= {
        "PER_WORD": layout.codes_per_word,
        "GROUP": layout.group,
        "ZERO": int(zero),
        "HAS_MINIMA": layout.has_minima,
    }
    if num_rows <= _FEW_CODES:
        tile = min(triton.next_power_of_2(max(num_rows, 1)), 4)
        outputs = 16
        plan.launch_gpu(
            linear_codes_few_kernel,
            *(*arrays, *strides),
            grid=(num_outputs // outputs, triton.cdiv(num_rows, tile)),
            # A lane for each output of each of the 16 chains, where waves are of 32.
            num_warps=outputs // (4 if plan.device.startswith("hip") else 2),
            SCALE_BITS=8 * layout.scale_dtype.block_bytes,
            ROWS=tile,
            OUTPUTS=outputs,
            **shared,
        )
        return
    outputs, tile, num_warps = (32, 16, 2) if num_rows <= 64 else (64, 32, 4)
    if num_rows > 64 and (layout.group == 16 or layout.has_minima):
        outputs = 32  # two dots or two sums a group: less room
    # RDNA has no registers for what a third stage of the largest tiles would hold.
    is_deep = layout.group == 32 and (outputs == 32 or plan.device.startswith("cuda"))
    plan.launch_gpu(
        linear_codes_kernel,
        *(*arrays, triton.cdiv(num_units, 16), *strides),
        grid=(triton.cdiv(num_rows, tile), num_outputs // outputs),
        num_warps=num_warps,
        OUTPUTS=outputs,
        ROWS=tile,
        STAGES=3 if is_deep else 2,
        **shared,
    )


def _floats(
    plan: PlanBuilder, facts: Mapping[str, Any], bias: Any, count: int, shared: dict[str, Any]
) -> None:
    weight, x, out = facts["weight"], facts["x"], facts["out"]
    pieces: Tensor | None = facts.get("pieces")
    packed: Packed = weight.data
    num_rows, num_outputs = x.shape[0], padded(packed.num_rows)
    num_chunks = -(-packed.num_columns // 64)
    # F32 weights take x as it is: one piece, which nobody scaled.
    from_x, row_scales, strides, num_pieces = x, x, (x.strides[0], 0), 1
    if pieces is not None:
        from_x, row_scales, num_pieces = pieces, facts["row_scales"], pieces.shape[1]
        strides = (pieces.strides[0], pieces.strides[1])
    arrays = (from_x, row_scales, facts["counts"], packed.parts[0], bias, out)
    sizes = (count, packed.num_columns, num_chunks)
    shared |= {"NUM_PIECES": num_pieces, "IS_BF16": weight.dtype is DType.BF16}
    if num_rows <= _FEW_FLOATS:
        # NVIDIA's matrix unit takes a single column, others want sixteen.
        tile = 1 if num_rows == 1 and plan.device.startswith("cuda") else 16
        plan.launch_gpu(
            linear_float_few_kernel,
            *(*arrays, *sizes, *strides, out.strides[0]),
            grid=(num_outputs // LANES, triton.cdiv(num_rows, tile)),
            ROWS=tile,
            STAGES=3 if num_pieces == 2 else 2,
            **shared,
        )
        return
    plan.launch_gpu(
        linear_float_kernel,
        *(*arrays, *sizes, triton.cdiv(num_chunks, 4), *strides, out.strides[0]),
        grid=(triton.cdiv(num_rows, 64), num_outputs // 64),
        num_warps=8,
        OUTPUTS=64,
        ROWS=64,
        STAGES=3 if num_pieces == 2 else 2,
        **shared,
    )
