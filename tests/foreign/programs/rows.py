"""Reads the beginnings of four rows that lie 2**30 elements apart: row 2 is beyond 32 bits."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def first_of_row(x_ptr, out_ptr, row_stride, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, WIDTH)
    values = tl.load(x_ptr + row * row_stride + columns)
    tl.store(out_ptr + row * WIDTH + columns, values)


device = "cuda" if "gpu" in sys.argv else "cpu"
# Address space: hardly a page of it is ever touched.
table = torch.empty(3 * 2**30 + 16, dtype=torch.int8, device=device)
rows = table.as_strided((4, 16), (2**30, 1))
out = torch.zeros(4, 16, dtype=torch.int8, device=device)
first_of_row[(4,)](rows, out, rows.stride(0), WIDTH=16)
if device == "cuda":
    torch.cuda.synchronize()
print("sum", out.sum().item())
