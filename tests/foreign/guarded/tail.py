"""Scales a vector whose mask says `<=`: one element too many is read, and one is written.

With `right` the mask says `<`. The kernel moves its pointers before it uses them.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, y_ptr, n, LAST: tl.constexpr, BLOCK: tl.constexpr = 128):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x_ptr += offsets
    y_ptr += offsets
    inside = offsets <= n if LAST else offsets < n
    tl.store(y_ptr, tl.load(x_ptr, inside, 0.0) * 2, inside)


def main(right: bool, device: str) -> None:
    n = 1000
    if device == "cuda":
        x, y = torch.ones(n, device=device), torch.zeros(n, device=device)
    else:
        memory = np.ones((2, 1024), np.float32)
        x, y = torch.from_numpy(memory[0, :n]), torch.from_numpy(memory[1, :n])
    scale[(triton.cdiv(n, 128),)](x, y, n, LAST=not right)
    print("sum", y.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv, "cuda" if "gpu" in sys.argv else "cpu")
