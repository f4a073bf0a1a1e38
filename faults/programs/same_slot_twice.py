"""Scatters rows to slots of which two are the same: which row is left, nobody can tell.

With `right` each row has its own.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scatter_rows(x_ptr, slots_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row)
    x = tl.load(x_ptr + row * width + column, mask=column < width)
    tl.store(out_ptr + slot * width + column, x, mask=column < width)


def main(right):
    x = torch.arange(6.0 * 40, device=DEVICE).view(6, 40)
    slots = torch.tensor([9, 3, 5, 1, 3 if not right else 2, 0], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(12, 40, device=DEVICE)
    scatter_rows[(6,)](x, slots, out, 40, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["race between programs"]
# kernels = ["scatter_rows"]
# arguments = ["out_ptr", "slots_ptr"]
# lines = ["tl.store(out_ptr"]
# fix = 'one program|slot|atomic'
# options = ["--suspect"]
# ///
