"""Counts tokens of each expert; padded rows name the expert behind the last.

With `right` there is room for it.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def count_experts(experts_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + at, mask=at < n, other=0)
    tl.atomic_add(counts_ptr + expert, 1, mask=at < n)


def main(right):
    num_experts = 8
    experts = torch.arange(96, dtype=torch.int32, device=DEVICE) % num_experts
    experts[80:] = num_experts  # padding
    counts = torch.zeros(num_experts + right, dtype=torch.int32, device=DEVICE)
    count_experts[(1,)](experts, counts, 96, BLOCK=128)
    print("sum", counts.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["count_experts"]
# arguments = ["experts_ptr"]
# lines = ["tl.atomic_add"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0|larger|room|9\b'
# never = 'at < n\b'
# ///
