"""Copies rows by a stride that was counted in bytes.

With `right` it is counted in elements.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def copy_rows(x_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    live = column < width
    x = tl.load(x_ptr + row * stride + column, mask=live)
    tl.store(out_ptr + row * width + column, x, mask=live)


def main(right):
    x, out = torch.ones(20, 100, device=DEVICE), torch.zeros(20, 100, device=DEVICE)
    stride = x.stride(0) * (1 if right else x.element_size())
    copy_rows[(20,)](x, out, stride, 100, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["wrong stride", "scalar out of range"]
# kernels = ["copy_rows"]
# arguments = ["x_ptr", "stride"]
# lines = ["row * stride"]
# fix = 'stride = 100|100|stride'
# ///
