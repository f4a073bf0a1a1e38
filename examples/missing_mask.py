"""Adds two vectors of 1000 numbers; one of the two loads has no mask. No GPU is needed to see it:

hypo check examples/missing_mask.py
"""

import torch
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x + y, mask=i < n)


n = 1000
x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
out = torch.empty_like(x)
add[(triton.cdiv(n, 256),)](x, y, out, n, BLOCK=256)
print(out.sum().item())
