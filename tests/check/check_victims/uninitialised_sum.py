"""Accumulates into torch.empty instead of torch.zeros."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def accumulate(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    old = tl.load(sum_ptr + offs, mask=mask)
    tl.store(sum_ptr + offs, old + tl.load(x_ptr + offs, mask=mask), mask=mask)


def run(faulty):
    x = torch.ones(300, device="cuda")
    total = torch.empty(300, device="cuda")
    if not faulty:
        total[:100].fill_(0)
        total[100:] = 0
    accumulate[(triton.cdiv(300, 64),)](x, total, 300, BLOCK=64)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
