"""Adds vectors whose addresses stand in a tensor: which memory is theirs nobody can tell.

Its other kernel is one as any, and leaves its tensor; with `right` it does not.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def add_listed(list_ptr, out_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(COUNT):
        pointer = tl.load(list_ptr + number).to(tl.pointer_type(tl.float32))
        total += tl.load(pointer + at)
    tl.store(out_ptr + at, total)


@triton.jit
def count_up(out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr + at, 1.0, mask=at < n)


def main(right: bool, device: str) -> None:
    vectors = [torch.full((32,), float(i), device=device) for i in range(4)]
    addresses = torch.tensor([v.data_ptr() for v in vectors], device=device)
    memory = torch.zeros(64) if device == "cuda" else torch.from_numpy(np.zeros(64, np.float32))
    out = memory.to(device)[:32]
    add_listed[(1,)](addresses, out, COUNT=4, BLOCK=32)
    count_up[(2,)](out, 32 if right else 40, BLOCK=32)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv, "cuda" if "gpu" in sys.argv else "cpu")
