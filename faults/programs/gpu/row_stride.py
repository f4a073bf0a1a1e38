"""A stride that is passed is far too large for 32 bits times the row."""

# mypy: ignore-errors
# Recorded core dumps name lines of this file.
import torch
import triton
import triton.language as tl


@triton.jit
def row_sums(x_ptr, out_ptr, stride, B: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, B)
    tl.store(out_ptr + row, tl.sum(tl.load(x_ptr + row * stride + c), 0))


def main():
    x = torch.randn(4096, 256, device="cuda")
    out = torch.empty(4096, device="cuda")
    row_sums[(4096,)](x, out, 1_000_003, B=256)
    print(out.sum().item())


main()

# /// truth
# causes = ["wrong stride", "scalar out of range"]
# kernels = ["row_sums"]
# arguments = ["stride", "x_ptr"]
# lines = ["row * stride"]
# fix = 'stride'
# options = []
# needs_gpu = true
# ///
