"""Scales rows in a loop; the compiler beside it (`broken_compiler`) makes wrong code of its stages.

With `right` the loop has one stage, for which that compiler's code is right.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scale_rows(x_ptr, out_ptr, factor, num_rows, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    for row in range(num_rows):
        x = tl.load(x_ptr + row * BLOCK + column)
        tl.store(out_ptr + row * BLOCK + column, x * factor)


def main(right):
    x = torch.randn(16, 128, device=DEVICE)
    out = torch.zeros_like(x)
    scale_rows[(1,)](x, out, 3.0, 16, BLOCK=128, num_stages=1 if right else 3)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["wrong code of the compiler"]
# kernels = ["scale_rows"]
# arguments = ["out_ptr"]
# lines = ["tl.store(out_ptr"]
# fix = 'compile|stage|Triton'
# options = ["--suspect"]
# needs_gpu = true
# beside = "broken_compiler"
# ///
