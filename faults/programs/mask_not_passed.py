"""Makes the mask of a tile in one line and stores without it in the next.

With `right` the store is masked.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_rows(
    x_ptr, bias_ptr, out_ptr, m, n, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (row < m)[:, None] & (column < n)[None, :]
    at = (row % m)[:, None] * n + (column % n)[None, :]
    y = tl.load(x_ptr + at) + tl.load(bias_ptr + column % n)[None, :]
    target = out_ptr + row[:, None] * n + column[None, :]
    if MASKED:
        tl.store(target, y, mask=mask)
    else:
        tl.store(target, y)


def main(right):
    x = torch.ones(33, 40, device=DEVICE)
    bias = torch.ones(40, device=DEVICE)
    out = torch.zeros(33, 40, device=DEVICE)
    add_rows[(3, 3)](x, bias, out, 33, 40, MASKED=right, BM=16, BN=16)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask"]
# kernels = ["add_rows"]
# arguments = ["out_ptr"]
# lines = ["tl.store(target, y)"]
# fix = 'mask'
# ///
