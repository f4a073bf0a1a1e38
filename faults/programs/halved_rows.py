"""Reads the row of a token by the slot of its expert, two slots to a token; one slot is too large.

With `right` all slots are in range.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def take_rows(x_ptr, slots_ptr, out_ptr, width, TOP: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.load(slots_ptr + tl.program_id(0))
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + slot // TOP * width + column, mask=column < width)
    tl.store(out_ptr + tl.program_id(0) * width + column, x, mask=column < width)


def main(right):
    x = torch.ones(8, 60, device=DEVICE)
    slots = torch.arange(16, dtype=torch.int32, device=DEVICE)
    if not right:
        slots[5] = 4000
    out = torch.zeros(16, 60, device=DEVICE)
    take_rows[(16,)](x, slots, out, 60, TOP=2, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["take_rows"]
# arguments = ["slots_ptr"]
# lines = ["tl.load(x_ptr + slot"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0'
# ///
