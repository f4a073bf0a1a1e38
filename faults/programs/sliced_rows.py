"""Sums the columns of a slice as if its rows lay one behind another in a larger matrix.

With `right` the stride of the slice is passed.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def sum_columns(x_ptr, out_ptr, num_rows, stride, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(num_rows):
        total += tl.load(x_ptr + row * stride + column)
    tl.store(out_ptr + column, total)


def main(right):
    x = torch.ones(64, 32, device=DEVICE)
    whole = torch.ones(64, 128, device=DEVICE)
    out = torch.zeros(32, device=DEVICE)
    sum_columns[(1,)](x, out, 64, x.stride(0) if right else whole.stride(0), BLOCK=32)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["wrong stride", "scalar out of range", "missing tail mask"]
# kernels = ["sum_columns"]
# arguments = ["stride", "x_ptr", "num_rows"]
# lines = ["tl.load(x_ptr + row * stride"]
# fix = 'stride|32|num_rows|mask'
# ///
