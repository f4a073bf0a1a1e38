"""Adds a residual of which there is none: its pointer is null.

With `right` there is one.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_residual(x_ptr, residual_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, x + tl.load(residual_ptr + at, mask=at < n), mask=at < n)


def main(right):
    x = torch.ones(256, device=DEVICE)
    residual = torch.ones(256 if right else 0, device=DEVICE)
    add_residual[(2,)](x, residual, 256, BLOCK=128)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["null pointer", "buffer too small"]
# kernels = ["add_residual"]
# arguments = ["residual_ptr"]
# fix = 'pass|tensor|residual'
# never = '\bmask\b'
# ///
