"""A sum takes the lanes that the mask of a load leaves out; healthy, the load has another value."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def centre(x_ptr, y_ptr, width, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    start = x_ptr + tl.program_id(0) * width
    mask = at < width
    x = tl.load(start + at, mask=mask, other=0.0) if OTHER else tl.load(start + at, mask=mask)
    y = x - tl.sum(x, axis=0) / width
    tl.store(y_ptr + tl.program_id(0) * width + at, y, mask=mask)


def run(faulty):
    x = torch.randn(3, 50, device="cuda")
    centre[(3,)](x, torch.empty_like(x), 50, OTHER=not faulty, BLOCK=64)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
