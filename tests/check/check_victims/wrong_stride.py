"""The output's stride is one too small: each row's last element is the next row's first."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, y_ptr, x_stride, y_stride, num_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    mask = cols < num_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask)
    tl.store(y_ptr + row * y_stride + cols, x * 2, mask=mask)


def run(faulty):
    x = torch.randn(4, 100).to("cuda")
    y = torch.empty(4, 100, device=x.device)
    double[4, 1, 1](x, y, 100, 99 if faulty else 100, 100, BLOCK=128)
    print("sum", y.sum().item())


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
