"""Adds up the parts of several programs by a load, a sum and a store.

With `right` there is one program.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_up(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0), axis=0)
    total = tl.load(total_ptr)
    tl.store(total_ptr, total + part)


def main(right):
    x = torch.ones(256, device=DEVICE)
    total = torch.zeros(1, device=DEVICE)
    block = 256 if right else 64
    add_up[(256 // block,)](x, total, 256, BLOCK=block)
    print("sum", total.item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["race between programs"]
# kernels = ["add_up"]
# arguments = ["total_ptr"]
# lines = ["total"]
# fix = 'atomic|one program'
# options = ["--suspect"]
# ///
