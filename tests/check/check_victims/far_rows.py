"""Row number times stride leaves int32: the rows beyond 2**31 elements land before the tensor."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl

EVERY = tl.constexpr(10_000)


@triton.jit
def mark(x_ptr, stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * EVERY
    if WIDE:
        row = row.to(tl.int64)
    tl.store(x_ptr + row * stride + tl.arange(0, BLOCK), 1)


def run(faulty):
    x = torch.empty(40_001, 65_536, dtype=torch.int8, device="cuda")
    x[::10_000, :8] = 0
    mark[(5,)](x, x.stride(0), WIDE=not faulty, BLOCK=8)
    assert faulty or x[::10_000, :8].sum() == 40


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
