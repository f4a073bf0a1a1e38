"""Scales the rows of each group; the store is masked by its rows and not by its columns.

With `right` it is masked by both.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scale_group(
    x_ptr, ends_ptr, out_ptr, n, BM: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr
):
    group = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = 0
    if group > 0:
        begin = tl.load(ends_ptr + group - 1)
    end = tl.load(ends_ptr + group)
    limit = n if WHOLE else BN * tl.num_programs(1)
    for start in range(begin, end, BM):
        row = start + tl.arange(0, BM)
        inside = (row < end)[:, None] & (column < n)[None, :]
        x = tl.load(x_ptr + row[:, None] * n + column[None, :], mask=inside, other=0.0)
        live = (row < end)[:, None] & (column < limit)[None, :]
        tl.store(out_ptr + row[:, None] * n + column[None, :], x * 2, mask=live)


def main(right):
    ends = torch.tensor([20, 40], dtype=torch.int32, device=DEVICE)
    x = torch.ones(40, 33, device=DEVICE)
    out = torch.zeros(40, 33, device=DEVICE)
    scale_group[(2, 3)](x, ends, out, 33, BM=16, BN=16, WHOLE=right)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask"]
# kernels = ["scale_group"]
# arguments = ["out_ptr"]
# lines = ["mask=live"]
# fix = 'inside|columns|\bn\b|offs_n|< 33'
# ///
