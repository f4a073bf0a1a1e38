"""Stores all but the last element, by a mask that was meant for differences.

With `right` it stores all.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def triple(x_ptr, out_ptr, n, LESS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x * 3, mask=at < n - LESS)


def main(right):
    x = torch.ones(1000, device=DEVICE)
    out = torch.empty(1000, device=DEVICE)
    triple[(8,)](x, out, 1000, LESS=0 if right else 1, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["output not written"]
# kernels = ["triple"]
# arguments = ["out_ptr"]
# lines = ["mask=at < n - LESS"]
# fix = 'mask|< n|later'
# never = 'grid'
# options = ["--suspect"]
# ///
