"""Reads rows with their unwritten padding, and takes the maximum of all of it."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def largest(x_ptr, left_ptr, out_ptr, IS_MASKED: tl.constexpr, WIDTH: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, WIDTH)
    left = tl.load(left_ptr + row)
    x = tl.load(x_ptr + row * WIDTH + cols)
    if IS_MASKED:
        x = tl.where(cols < left, x, -float("inf"))
    tl.store(out_ptr + row, tl.max(x))
    tl.store(left_ptr + row, left - 1)


def run(faulty):
    x = torch.empty(3, 16, device="cuda")
    x[:, :5] = torch.arange(1.0, 6.0, device="cuda")
    left = torch.tensor([5, 3, 1], device="cuda")
    out = torch.empty(3, device="cuda")
    largest[(3,)](x, left, out, IS_MASKED=not faulty, WIDTH=16)
    assert left.tolist() == [4, 2, 0]
    assert out.tolist() == ([5, 5, 5] if faulty else [5, 3, 1])


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
