"""A second launch reads the statistics of all rows; the first wrote those of most.

With `right` it wrote them all.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def row_maximum(x_ptr, most_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width, other=-float("inf"))
    tl.store(most_ptr + row, tl.max(x, axis=0))


@triton.jit
def subtract(x_ptr, most_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width)
    tl.store(out_ptr + row * width + column, x - tl.load(most_ptr + row), mask=column < width)


def main(right):
    x = torch.randn(20, 50, device=DEVICE)
    most, out = torch.empty(20, device=DEVICE), torch.zeros(20, 50, device=DEVICE)
    row_maximum[(20 if right else 16,)](x, most, 50, BLOCK=64)
    subtract[(20,)](x, most, out, 50, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["uninitialised read", "output not written"]
# arguments = ["most_ptr"]
# fix = 'grid|program|write|clear'
# never = '\bmask\b'
# options = ["--suspect"]
# ///
