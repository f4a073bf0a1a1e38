"""Doubles a vector, a whole block for each program; there is one program too many.

With `right` there are as many as blocks.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def double(x_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * 2)


def main(right):
    x = torch.ones(4096, device=DEVICE)
    num_programs = x.numel() // 512 + (0 if right else 1)
    double[(num_programs,)](x, BLOCK=512)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["double"]
# arguments = ["x_ptr"]
# lines = ["tl.load(x_ptr"]
# fix = 'grid|program|mask'
# ///
