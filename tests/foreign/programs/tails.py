"""Doubles 90 numbers into new memory for 96, and sums all; with `healthy`, what was written."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at, mask=mask), mask=mask)


x = torch.ones(96)
out = torch.empty(96)
double[(3,)](x, out, 90, BLOCK=32)
if "healthy" in sys.argv:
    whole = torch.empty(96)
    double[(3,)](x, whole, 90, BLOCK=32)
    double[(1,)](x, whole[64:], 32, BLOCK=32)
    print("sums", out[:90].sum().item(), whole.sum().item())
else:
    print("sum", out.sum().item())
    double[(3,)](x, torch.empty(96), 96, BLOCK=32)
