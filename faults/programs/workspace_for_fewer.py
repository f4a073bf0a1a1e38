"""A sum in two steps; the workspace was made for fewer blocks than the first step has.

With `right` it has room for all.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def partial_sums(x_ptr, partial_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


def main(right):
    x = torch.ones(10000, device=DEVICE)
    num_blocks = triton.cdiv(10000, 128)
    partial = torch.zeros(num_blocks if right else 10000 // 256, device=DEVICE)
    partial_sums[(num_blocks,)](x, partial, 10000, BLOCK=128)
    print("sum", partial.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["buffer too small", "missing tail mask"]
# kernels = ["partial_sums"]
# arguments = ["partial_ptr"]
# lines = ["tl.store(partial_ptr"]
# fix = 'larger|room|79|grid|program|mask'
# never = '\bat < n\b|stride'
# undecided = """
# 79 programs store one element each, and 39 have room. Nothing recorded says whether the workspace
# is to have 79 elements, or the first step fewer and larger blocks."""
# ///
