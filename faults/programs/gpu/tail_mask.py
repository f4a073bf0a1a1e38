"""Stores without a mask, and far more programs than there are rows: beyond all memory of torch."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, out_ptr, n, STEP: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x * 2)


def main():
    n = (64 << 20) - 1000
    x = torch.randn(n, device="cuda")
    out = torch.empty(n, device="cuda")
    double[(triton.cdiv(n, 1 << 20) + 4096,)](x, out, n, STEP=1 << 20, B=1024)
    print(out.sum().item())


main()

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["double"]
# arguments = ["out_ptr"]
# lines = ["tl.store(out_ptr"]
# fix = 'mask|< n'
# options = []
# needs_gpu = true
# ///
