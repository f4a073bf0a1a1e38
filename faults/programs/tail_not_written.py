"""Doubles whole blocks only; the tail of the output stays as `empty` left it.

With `right` the grid covers it.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def double_blocks(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


def main(right):
    x = torch.ones(1000, device=DEVICE)
    out = torch.empty(1000, device=DEVICE)
    double_blocks[(triton.cdiv(1000, 128) if right else 1000 // 128,)](x, out, 1000, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["grid too small"]
# kernels = ["double_blocks"]
# arguments = ["out_ptr"]
# lines = ["double_blocks[("]
# fix = 'Launch|grid|program'
# never = '\bmask\b'
# options = ["--suspect"]
# ///
