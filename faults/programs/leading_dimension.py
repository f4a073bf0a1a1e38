"""Passes the leading dimension of the whole matrix for a copy of its left half.

With `right` that of the copy is passed.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def row_sums(a_ptr, out_ptr, lda, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + row * lda + column, mask=column < n, other=0.0)
    tl.store(out_ptr + row, tl.sum(a, axis=0))


def main(right):
    whole = torch.ones(64, 120, device=DEVICE)
    half = whole[:, :60].contiguous()
    out = torch.zeros(64, device=DEVICE)
    row_sums[(64,)](half, out, half.stride(0) if right else whole.stride(0), 60, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["wrong stride"]
# kernels = ["row_sums"]
# arguments = ["lda", "a_ptr"]
# lines = ["row * lda"]
# fix = 'lda|stride|60'
# never = '\bmask\b'
# ///
