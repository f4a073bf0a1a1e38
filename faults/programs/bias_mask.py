"""Adds a bias; its mask takes one column too many.

With `right` it says `<`.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_bias(x_ptr, bias_ptr, width, LAST: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = column <= width if LAST else column < width
    x = tl.load(x_ptr + column, mask=live)
    tl.store(x_ptr + column, x + tl.load(bias_ptr + column, mask=live), mask=live)


def main(right):
    width = 1000
    x, bias = torch.zeros(width, device=DEVICE), torch.ones(width, device=DEVICE)
    add_bias[(triton.cdiv(width, 256),)](x, bias, width, LAST=not right, BLOCK=256)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["add_bias"]
# arguments = ["x_ptr", "bias_ptr", "width"]
# lines = ["column <= width"]
# fix = '<'
# ///
