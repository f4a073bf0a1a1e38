"""Sums of rows, once right and once without the last quarter; references stand beside them.

hypo verify examples/row_sums.py
"""

import torch
import triton
import triton.language as tl

import hypocenter


@triton.jit
def row_sums(x_ptr, out_ptr, m, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + column, mask=column < n, other=0.0)
    tl.store(out_ptr + row, tl.sum(x, axis=0))


@triton.jit
def short_sums(x_ptr, out_ptr, m, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + column, mask=column < n - n // 4, other=0.0)
    tl.store(out_ptr + row, tl.sum(x, axis=0))


#: Numbers as choices; tensors as a type and axes, which may be expressions over the numbers.
DRAW = {
    "x_ptr": ("f32", "m", "n"),
    "out_ptr": ("f32", "m"),
    "m": (1, 5),
    "n": (2, 3, 37),
    "BLOCK": (64,),
}


@hypocenter.reference(row_sums, sums="n", draw=DRAW, grid=lambda m, n, BLOCK: (m,))
@hypocenter.reference(short_sums, sums="n", draw=DRAW, grid=lambda m, n, BLOCK: (m,))
def sums(x_ptr, out_ptr, m, n, BLOCK):
    return {"out_ptr": x_ptr.sum(dim=1)}


if __name__ == "__main__":
    x = torch.randn(3, 50, device="cuda")
    out = torch.empty(3, device="cuda")
    row_sums[(3,)](x, out, 3, 50, BLOCK=64)
