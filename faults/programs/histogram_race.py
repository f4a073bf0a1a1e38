"""Counts without atomics: two programs read a bin, and both write it.

With `right` they add at once.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def count_plain(x_ptr, bins_ptr, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    for i in range(first, tl.minimum(first + BLOCK, n)):
        value = tl.load(x_ptr + i)
        if ATOMIC:
            tl.atomic_add(bins_ptr + value, 1)
        else:
            tl.store(bins_ptr + value, tl.load(bins_ptr + value) + 1)


def main(right):
    x = (torch.arange(400, device=DEVICE) % 8).int()
    bins = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    count_plain[(4,)](x, bins, 400, ATOMIC=right, BLOCK=100)
    print("sum", bins.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["race between programs"]
# kernels = ["count_plain"]
# arguments = ["bins_ptr"]
# lines = ["tl.store(bins_ptr"]
# fix = 'atomic|one program'
# options = ["--suspect"]
# ///
