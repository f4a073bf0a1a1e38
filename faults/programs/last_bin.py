"""Counts values into bins; the largest value falls behind the last bin.

With `right` it is held to the last one.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def count(x_ptr, bins_ptr, n, num_bins, HELD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0)
    found = x * num_bins // 256
    if HELD:
        found = tl.minimum(found, num_bins - 1)
    tl.atomic_add(bins_ptr + found, 1, mask=at < n)


def main(right):
    x = torch.arange(1000, dtype=torch.int32, device=DEVICE) % 257
    bins = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    count[(8,)](x, bins, 1000, 16, HELD=right, BLOCK=128)
    print("sum", bins.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["count"]
# arguments = ["x_ptr"]
# lines = ["tl.atomic_add"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0|bin'
# never = 'at < n\b'
# ///
