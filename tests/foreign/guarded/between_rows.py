"""Fills the left part of each row of a buffer, by a mask of the whole row: the right part is lost.

With `right` the mask has the part's width. Rows are left alone where they end, so what is wrong
lies between the first and the last element of the view.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def fill_left(out_ptr, pitch, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * pitch + columns, row + 1.0, mask=columns < width)


def main(right: bool, device: str) -> None:
    both = torch.ones(8, 96, device=device)
    left = both[:, :64]
    fill_left[(7,)](left, left.stride(0), 64 if right else 96, BLOCK=128)
    print("sum", left.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv, "cuda" if "gpu" in sys.argv else "cpu")
