"""Copies the first bytes of four rows that lie 1 GiB apart, with offsets of only 32 bits.

The kernel computes `row * row_stride` in 32 bits. From row 2 on the product is negative, so the
load reads in front of the tensor. No GPU is needed to see it:

    TRITON_INTERPRET=1 hypo doctor -- python examples/long_rows.py
"""

import torch
import triton
import triton.language as tl


@triton.jit
def first_of_row(x_ptr, out_ptr, row_stride, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    tl.store(out_ptr + row * WIDTH + column, tl.load(x_ptr + row * row_stride + column))


device = "cuda" if torch.cuda.is_available() else "cpu"
memory = torch.empty(3 * 2**30 + 16, dtype=torch.int8, device=device)  # the pages stay untouched
rows = memory.as_strided((4, 16), (2**30, 1))
out = torch.empty(4, 16, dtype=torch.int8, device=device)
first_of_row[(4,)](rows, out, rows.stride(0), WIDTH=16)
if device == "cuda":
    torch.cuda.synchronize()
print(out.sum().item())
