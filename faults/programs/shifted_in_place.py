"""Shifts a vector by one block in place: a program reads what its neighbour writes.

With `right` it writes elsewhere.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def shift(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + BLOCK, mask=at + BLOCK < n, other=0.0)
    tl.store(out_ptr + at, x, mask=at < n)


def main(right):
    x = torch.arange(1024.0, device=DEVICE)
    out = torch.empty_like(x) if right else x
    shift[(16,)](x, out, 1024, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["race between programs"]
# kernels = ["shift"]
# arguments = ["x_ptr", "out_ptr"]
# lines = ["tl."]
# fix = 'copy|launches|one program|elsewhere'
# options = ["--suspect"]
# ///
