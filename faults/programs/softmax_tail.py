"""A softmax over rows whose last columns are stored without a mask.

With `right` the store is masked as the load is.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def softmax(x_ptr, out_ptr, num_columns, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * num_columns + column, mask=column < num_columns, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    y = e / tl.sum(e, axis=0)
    if MASKED:
        tl.store(out_ptr + row * num_columns + column, y, mask=column < num_columns)
    else:
        tl.store(out_ptr + row * num_columns + column, y)


def main(right):
    x = torch.randn(1, 1000, device=DEVICE)
    out = torch.empty_like(x)
    softmax[(1,)](x, out, 1000, MASKED=right, BLOCK=1024)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["softmax"]
# arguments = ["out_ptr"]
# lines = ["num_columns + column, y)"]
# fix = 'mask|< num_columns'
# ///
