"""Sums sequences that lie one behind another; their last end is beyond the tokens.

With `right` it is their number.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def sum_sequences(x_ptr, starts_ptr, out_ptr, BLOCK: tl.constexpr):
    sequence = tl.program_id(0)
    first, last = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < last, other=0.0)
    tl.store(out_ptr + sequence, tl.sum(total, axis=0))


def main(right):
    x = torch.ones(300, device=DEVICE)
    ends = [0, 100, 180, 300 if right else 333]
    starts = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, device=DEVICE)
    sum_sequences[(3,)](x, starts, out, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed", "scalar out of range"]
# kernels = ["sum_sequences"]
# arguments = ["starts_ptr"]
# lines = ["tl.load(x_ptr"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0|300|end'
# ///
