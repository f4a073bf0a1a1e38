"""A function under torch.compile launches a kernel of one's own, which has no mask.

With `right` it has.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_bias(x_ptr, bias_ptr, out_ptr, n, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bias = tl.load(bias_ptr)
    if MASKED:
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) + bias, mask=at < n)
    else:
        x = tl.load(x_ptr + at)
        tl.store(out_ptr + at, x + bias, mask=at < n)


@torch.compile
def forward(x, bias, right):
    out = torch.empty_like(x)
    n = x.numel()
    add_bias[(triton.cdiv(n, 1024),)](x, bias, out, n, MASKED=right, BLOCK=1024)
    return out * 2.0


def main(right):
    x = torch.ones(1000, device=DEVICE)
    bias = torch.ones(1, device=DEVICE)
    print("sum", forward(x, bias, right).sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["add_bias"]
# arguments = ["x_ptr"]
# lines = ["x = tl.load(x_ptr + at)"]
# fix = 'mask|< n'
# options = ["--suspect"]
# needs_gpu = true
# ///
