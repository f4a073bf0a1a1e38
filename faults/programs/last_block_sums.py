"""The last program adds up what the others left, and counts on their having ended.

With `right` a second launch does so.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def sum_blocks(
    x_ptr, partial_ptr, out_ptr, FINISHES: tl.constexpr, NUM: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.program_id(0)
    tl.store(partial_ptr + number, tl.sum(tl.load(x_ptr + number * BLOCK + tl.arange(0, BLOCK))))
    if FINISHES:
        if number == NUM - 1:
            tl.store(out_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, NUM))))


@triton.jit
def sum_partial(partial_ptr, out_ptr, NUM: tl.constexpr):
    tl.store(out_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, NUM))))


def main(right):
    x = torch.ones(16 * 64, device=DEVICE)
    partial, out = torch.zeros(16, device=DEVICE), torch.zeros(1, device=DEVICE)
    sum_blocks[(16,)](x, partial, out, FINISHES=not right, NUM=16, BLOCK=64)
    if right:
        sum_partial[(1,)](partial, out, NUM=16)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["race between programs"]
# kernels = ["sum_blocks"]
# arguments = ["partial_ptr"]
# lines = ["partial_ptr"]
# fix = 'two launches|launch|program|atomic'
# options = ["--suspect"]
# ///
