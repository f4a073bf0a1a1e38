"""One program for each row, in the third dimension of the grid, which takes 65,535.

With `right` the rows lie in the first.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def negate(x_ptr, IN_Z: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(2) if IN_Z else tl.program_id(0)
    at = row * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, -tl.load(x_ptr + at))


def main(right):
    num_rows = 70000
    x = torch.ones(num_rows, 4, device=DEVICE)
    if DEVICE == "cpu" and right:
        x = x[:100].clone()  # an interpreter takes its time
    grid = (x.shape[0], 1, 1) if right else (1, 1, num_rows)
    negate[grid](x, IN_Z=not right, BLOCK=4)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["grid over the limit"]
# kernels = ["negate"]
# fix = '65,?535|first|axis|dimension|grid'
# options = []
# needs_gpu = true
# ///
