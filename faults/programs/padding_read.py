"""Stores rows of 40 columns with a pitch of 64; a maximum over whole rows reads the padding.

With `right` it is masked.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def copy_padded(x_ptr, out_ptr, width, pitch, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column, mask=column < width)
    tl.store(out_ptr + row * pitch + column, x, mask=column < width)


@triton.jit
def largest(x_ptr, out_ptr, width, pitch, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    if MASKED:
        x = tl.load(x_ptr + row * pitch + column, mask=column < width, other=-float("inf"))
    else:
        x = tl.load(x_ptr + row * pitch + column)
    tl.store(out_ptr + row, tl.max(x, axis=0))


def main(right):
    x = torch.randn(12, 40, device=DEVICE)
    padded, out = torch.empty(12, 64, device=DEVICE), torch.zeros(12, device=DEVICE)
    copy_padded[(12,)](x, padded, 40, 64, BLOCK=64)
    largest[(12,)](padded, out, 40, 64, MASKED=right, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["uninitialised read"]
# kernels = ["largest"]
# arguments = ["x_ptr"]
# lines = ["pitch + column)"]
# fix = 'mask|clear|write'
# options = ["--suspect"]
# ///
