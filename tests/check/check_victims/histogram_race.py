"""Programs count into one histogram, with a plain load and store instead of an atomic."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def count(x_ptr, bins_ptr, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bins = bins_ptr + tl.load(x_ptr + offs, mask=offs < n, other=0)
    if ATOMIC:
        tl.atomic_add(bins, 1, mask=offs < n)
    else:
        tl.store(bins, tl.load(bins, mask=offs < n) + 1, mask=offs < n)


def run(faulty):
    x = torch.randint(0, 8, (100,), dtype=torch.int32, device="cuda")
    bins = torch.zeros(8, dtype=torch.int32, device="cuda")
    count[(4,)](x, bins, 100, ATOMIC=not faulty, BLOCK=32)
    assert faulty or torch.equal(bins.cpu().long(), torch.bincount(x.cpu(), minlength=8))


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
