"""Stores rows four programs too far: the neighbour in the same pool of memory is overwritten.

With `right` the grid is as many programs as there are rows. On a GPU both tensors lie in one
segment of torch's allocator, so nothing faults; on the CPU they are parts of one numpy array.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import numpy as np
import torch
import triton
import triton.language as tl


@triton.jit
def fill_rows(out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * width + columns, row + 1.0, mask=columns < width)


def main(right: bool, device: str) -> None:
    if device == "cuda":
        out, neighbour = torch.zeros(8, 64, device=device), torch.zeros(8, 64, device=device)
    else:
        pool = np.zeros((2, 8, 64), np.float32)
        out, neighbour = torch.from_numpy(pool[0]), torch.from_numpy(pool[1])
    for _ in range(3):
        fill_rows[(8 if right else 12,)](out, 64, BLOCK=64)
    print("sum", out.sum().item(), "neighbour", neighbour.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv, "cuda" if "gpu" in sys.argv else "cpu")
