"""Adds what an adapter makes of a row; rows without one have the number -1.

With `right` these rows are left out.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_adapter(x_ptr, which_ptr, adapters_ptr, width, SKIPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    which = tl.load(which_ptr + row)
    column = tl.arange(0, BLOCK)
    live = column < (tl.where(which >= 0, width, 0) if SKIPS else width)
    added = tl.load(adapters_ptr + which * width + column, mask=live, other=0.0)
    x = tl.load(x_ptr + row * width + column, mask=column < width)
    tl.store(x_ptr + row * width + column, x + added, mask=column < width)


def main(right):
    x, adapters = torch.zeros(6, 80, device=DEVICE), torch.ones(3, 80, device=DEVICE)
    which = torch.tensor([0, 2, -1, 1, -1, 0], dtype=torch.int32, device=DEVICE)
    add_adapter[(6,)](x, which, adapters, 80, SKIPS=right, BLOCK=128)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["add_adapter"]
# arguments = ["which_ptr"]
# lines = ["tl.load(adapters_ptr"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0|-1'
# ///
