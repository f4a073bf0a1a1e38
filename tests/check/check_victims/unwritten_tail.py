"""The grid is rounded down, so nobody writes the last block."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


def run(faulty):
    x = torch.randn(10, 30, device="cuda")
    y = torch.empty_like(x)
    copy[(300 // 64 if faulty else triton.cdiv(300, 64),)](x, y, 300, BLOCK=64)
    # A buffer that is longer than what is used of it is no fault, as long as nobody looks.
    longer = torch.empty(400, device="cuda")
    copy[(5,)](x, longer, 300, BLOCK=64)
    print("mean", longer[:300].mean().item())


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
