"""Turns queries by a table of cosines that is shorter than the longest position.

With `right` all positions lie in it.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def turn(x_ptr, positions_ptr, cos_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    position = tl.load(positions_ptr + token)
    column = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + position * width + column)
    x = tl.load(x_ptr + token * width + column)
    tl.store(x_ptr + token * width + column, x * cos)


def main(right):
    x = torch.ones(5, 32, device=DEVICE)
    cos = torch.ones(128, 32, device=DEVICE)
    positions = torch.tensor([0, 1, 2, 3, 127 if right else 1 << 25], device=DEVICE)
    turn[(5,)](x, positions, cos, 32, BLOCK=32)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["turn"]
# arguments = ["positions_ptr"]
# lines = ["tl.load(cos_ptr"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0|rows|position'
# ///
