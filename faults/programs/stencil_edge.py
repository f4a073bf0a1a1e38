"""Averages neighbours; the last element has none behind it.

With `right` the load is masked by where the neighbour lies.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def smooth(x_ptr, out_ptr, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(x_ptr + i, mask=i < n, other=0.0)
    if MASKED:
        behind = tl.load(x_ptr + i + 1, mask=i + 1 < n, other=0.0)
    else:
        behind = tl.load(x_ptr + i + 1, mask=i < n, other=0.0)
    tl.store(out_ptr + i, (here + behind) / 2, mask=i < n)


def main(right):
    x, out = torch.ones(640, device=DEVICE), torch.zeros(640, device=DEVICE)
    smooth[(10,)](x, out, 640, MASKED=right, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["smooth"]
# arguments = ["x_ptr", "n"]
# lines = ["x_ptr + i + 1"]
# fix = '< n|mask|earlier'
# ///
