"""Triton kernel of `join`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.contracts.contract import Contract
from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow

_BLOCK = 256


@triton.jit
def join_kernel(
    parts_ptr, counts_ptr, out_ptr, part_stride, row_stride, num_columns, out_stride,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row, part = tl.program_id(0), tl.program_id(2)
    if row >= tl.load(counts_ptr + 1):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    row = as_offset(row, WIDE)
    start = as_offset(part, WIDE) * part_stride + row * row_stride
    value = tl.load(parts_ptr + start + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * out_stride + part * num_columns + column, value, mask=inside)


def add_join(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append join: one program for 256 columns of each row of each part."""
    parts, out, num_columns = facts["parts"], facts["out"], facts["num_columns"]
    num_rows = out.shape[0]
    plan.add_gpu(
        join_kernel,
        *(parts, facts["counts"], out, num_rows * parts.strides[0], parts.strides[0]),
        *(num_columns, out.strides[0]),
        grid=(num_rows, triton.cdiv(num_columns, _BLOCK), parts.shape[0] // num_rows),
        contract=contract,
        facts=facts,
        BLOCK=_BLOCK,
    )
