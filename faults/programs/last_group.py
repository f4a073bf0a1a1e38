"""Scales groups of 32 columns; the width is no multiple of that, and the last group is whole.

With `right` it is.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scale_groups(x_ptr, scales_ptr, out_ptr, width, GROUP: tl.constexpr):
    row, group = tl.program_id(0), tl.program_id(1)
    at = row * width + group * GROUP + tl.arange(0, GROUP)
    scale = tl.load(scales_ptr + row * tl.num_programs(1) + group)
    tl.store(out_ptr + at, tl.load(x_ptr + at) * scale)


def main(right):
    width = 96 if right else 88
    x = torch.ones(5, width, device=DEVICE)
    scales = torch.ones(5, 3, device=DEVICE)
    out = torch.zeros(5, width, device=DEVICE)
    scale_groups[(5, 3)](x, scales, out, width, GROUP=32)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["scale_groups"]
# arguments = ["x_ptr", "out_ptr"]
# lines = ["tl.load(x_ptr + at)"]
# fix = 'mask|< width|88'
# ///
