"""A running sum in blocks: each block adds the last element of the block before it, out of order.

With `right` one program walks all blocks.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def block_sums(x_ptr, out_ptr, n, ALONE: tl.constexpr, BLOCK: tl.constexpr):
    inside = tl.arange(0, BLOCK)
    if ALONE:
        before = 0.0
        for start in range(0, n, BLOCK):
            x = tl.load(x_ptr + start + inside, mask=start + inside < n, other=0.0)
            tl.store(out_ptr + start + inside, tl.cumsum(x, axis=0) + before, start + inside < n)
            before += tl.sum(x, axis=0)
    else:
        start = tl.program_id(0) * BLOCK
        x = tl.load(x_ptr + start + inside, mask=start + inside < n, other=0.0)
        before = tl.load(out_ptr + start - 1, mask=start > 0, other=0.0)
        tl.store(out_ptr + start + inside, tl.cumsum(x, axis=0) + before, start + inside < n)


def main(right):
    x, out = torch.ones(500, device=DEVICE), torch.zeros(500, device=DEVICE)
    block_sums[(1 if right else 4,)](x, out, 500, ALONE=right, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["race between programs"]
# kernels = ["block_sums"]
# arguments = ["out_ptr"]
# lines = ["out_ptr + start"]
# fix = 'one program|launches|copy|program'
# options = ["--suspect"]
# ///
