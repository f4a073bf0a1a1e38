"""Rounds the number of tiles down along the second axis of the grid.

With `right` it is rounded up.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def copy_tiles(x_ptr, out_ptr, m, n, BM: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (row < m)[:, None] & (column < n)[None, :]
    at = row[:, None] * n + column[None, :]
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=mask), mask=mask)


def main(right):
    x = torch.ones(40, 50, device=DEVICE)
    out = torch.empty(40, 50, device=DEVICE)
    num_columns = triton.cdiv(50, 16) if right else 50 // 16
    copy_tiles[(triton.cdiv(40, 16), num_columns)](x, out, 40, 50, BM=16, BN=16)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["grid too small"]
# kernels = ["copy_tiles"]
# arguments = ["out_ptr"]
# lines = ["copy_tiles[("]
# fix = 'Launch|grid|program'
# never = '\bmask\b'
# options = ["--suspect"]
# ///
