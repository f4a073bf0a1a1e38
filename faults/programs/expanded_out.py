"""Adds to each row of a tensor whose rows are one and the same by `expand`.

With `right` each row has memory of its own.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_row_number(x_ptr, row_stride, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    at = x_ptr + row * row_stride + column
    tl.store(at, tl.load(at, mask=column < width) + row, mask=column < width)


def main(right):
    x = torch.zeros(1, 60, device=DEVICE).expand(16, 60)
    if right:
        x = x.contiguous()
    add_row_number[(16,)](x, x.stride(0), 60, BLOCK=64)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["race between programs"]
# kernels = ["add_row_number"]
# arguments = ["x_ptr"]
# lines = ["tl.store(at"]
# fix = 'one program|copy|atomic|contiguous|clone|stride|launches'
# options = ["--suspect"]
# ///
