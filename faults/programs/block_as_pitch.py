"""Takes the size of a tile for the distance of two rows.

With `right` it takes their width.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def halve(x_ptr, out_ptr, width, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if PACKED:
        x = tl.load(x_ptr + row * width + column, mask=column < width)
    else:
        x = tl.load(x_ptr + row * BLOCK + column, mask=column < width)
    tl.store(out_ptr + row * width + column, x / 2, mask=column < width)


def main(right):
    x = torch.ones(64, 60, device=DEVICE)
    out = torch.zeros(64, 60, device=DEVICE)
    halve[(64,)](x, out, 60, PACKED=right, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["wrong stride"]
# kernels = ["halve"]
# arguments = ["BLOCK", "x_ptr"]
# lines = ["row * BLOCK"]
# fix = 'BLOCK|width|pitch|stride|60'
# ///
