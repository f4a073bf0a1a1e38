"""Sums rows that lie 2**30 elements apart: row * stride leaves 32 bits at row 2, and is negative.

With `right` the row is a 64-bit number.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def sum_rows(x_ptr, out_ptr, stride, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = row.to(tl.int64) * stride if WIDE else row * stride
    x = tl.load(x_ptr + start + tl.arange(0, BLOCK))
    tl.store(out_ptr + row, tl.sum(x.to(tl.int32)))


def main(right: bool, device: str) -> None:
    # Address space: hardly a page of it is ever touched.
    table = torch.empty(3 * 2**30 + 16, dtype=torch.int8, device=device)
    rows = table.as_strided((4, 16), (2**30, 1))
    rows.fill_(1)
    out = torch.zeros(4, dtype=torch.int32, device=device)
    sum_rows[(4,)](rows, out, rows.stride(0), WIDE=right, BLOCK=16)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv, "cuda" if "gpu" in sys.argv else "cpu")
