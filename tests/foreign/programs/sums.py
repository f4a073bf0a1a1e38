"""Adds the sums of rows to a tensor that nobody has cleared; with `cleared`, to one of zeros."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def add_sums(x_ptr, out_ptr, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * num_columns + columns, mask=columns < num_columns, other=0.0)
    tl.store(out_ptr + row, tl.load(out_ptr + row) + tl.sum(x))


make = torch.zeros if "cleared" in sys.argv else torch.empty
x = torch.ones(8, 50)
out = make(8)
add_sums[(8,)](x, out, 50, BLOCK=64)
print("sum", out.sum().item())
