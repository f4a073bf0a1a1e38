"""Lanes add to their own element and to that of a lane further on, with plain loads and stores."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def spread(x_ptr, y_ptr, n, FAR: tl.constexpr, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    if ATOMIC:
        tl.atomic_add(y_ptr + at, x, mask=at < n)
        tl.atomic_add(y_ptr + at + FAR, x, mask=at + FAR < n)
    else:
        near = tl.load(y_ptr + at, mask=at < n, other=0.0)
        far = tl.load(y_ptr + at + FAR, mask=at + FAR < n, other=0.0)
        tl.store(y_ptr + at, near + x, mask=at < n)
        tl.store(y_ptr + at + FAR, far + x, mask=at + FAR < n)


def run(faulty):
    x, y = torch.arange(50.0, device="cuda"), torch.zeros(50, device="cuda")
    spread[(1,)](x, y, 50, FAR=4, ATOMIC=not faulty, BLOCK=64)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
