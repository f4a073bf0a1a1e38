"""Transposes a matrix; of the store's mask rows and columns are exchanged.

With `right` the matrix is square.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def transpose(x_ptr, out_ptr, num_rows, num_columns, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = (row < num_columns) & (column < num_rows)
    x = tl.load(x_ptr + row * num_columns + column, mask=live, other=0.0)
    tl.store(out_ptr + column * num_rows + row, x, mask=live)


def main(right):
    num_rows, num_columns = (24, 24) if right else (20, 44)
    x = torch.ones(num_rows, num_columns, device=DEVICE)
    out = torch.zeros(num_columns, num_rows, device=DEVICE)
    grid = (triton.cdiv(num_columns, 16), triton.cdiv(num_columns, 16))
    transpose[grid](x, out, num_rows, num_columns, BLOCK=16)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["transpose"]
# arguments = ["x_ptr", "out_ptr", "num_rows", "num_columns"]
# fix = 'row|column|mask|exchange|earlier'
# ///
