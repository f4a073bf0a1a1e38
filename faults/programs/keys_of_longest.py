"""Sums the rows of each sequence; they are masked by the length of the longest one.

With `right` they are masked by their own.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def sum_own(
    x_ptr, starts_ptr, out_ptr, longest, OWN: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):
    sequence = tl.program_id(0)
    start = tl.load(starts_ptr + sequence)
    length = tl.load(starts_ptr + sequence + 1) - start
    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    at = (start + row[:, None]) * D + d[None, :]
    live = tl.where(row < length, 1.0, 0.0)[:, None]
    if OWN:
        x = tl.load(x_ptr + at, mask=row[:, None] < length, other=0.0)
    else:
        x = tl.load(x_ptr + at, mask=row[:, None] < longest, other=0.0)
    tl.store(out_ptr + sequence * D + d, tl.sum(x * live, axis=0))


def main(right):
    starts = torch.tensor([0, 21, 61, 70], dtype=torch.int32, device=DEVICE)
    x = torch.randn(70, 16, device=DEVICE)
    out = torch.zeros(3, 16, device=DEVICE)
    sum_own[(3,)](x, starts, out, 40, OWN=right, ROWS=64, D=16)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask"]
# kernels = ["sum_own"]
# arguments = ["x_ptr"]
# lines = ["row[:, None] < longest"]
# fix = 'mask|seqlen|length|own|<'
# ///
