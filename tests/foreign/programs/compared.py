"""Adds 1000 numbers with a grid of `n // BLOCK`, and compares in the way that is named."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def add(a_ptr, b_ptr, z_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    a, b = tl.load(a_ptr + at, mask=mask), tl.load(b_ptr + at, mask=mask)
    tl.store(z_ptr + at, a + b, mask=mask)


a, b, z = torch.ones(1000), torch.ones(1000), torch.empty(1000)
how = sys.argv[1]
grid = triton.cdiv(1000, 256) if "right" in sys.argv else 1000 // 256
add[(grid,)](a, b, z, 1000, BLOCK=256)
if how == "difference":
    print((z - (a + b)).abs().max())
elif how == "assert_close":
    torch.testing.assert_close(z, a + b)
elif how == "twice":
    twice = z * 2
    print(twice[:768].sum().item())
elif how == "print":
    print(z)
