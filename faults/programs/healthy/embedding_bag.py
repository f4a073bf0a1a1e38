"""Sums the rows of a table that each bag lists; bags differ in length, and one is empty."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def sum_bags(table_ptr, ids_ptr, starts_ptr, out_ptr, width, BLOCK: tl.constexpr):
    bag, column = tl.program_id(0), tl.arange(0, BLOCK)
    first, last = tl.load(starts_ptr + bag), tl.load(starts_ptr + bag + 1)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(first, last):
        row = tl.load(ids_ptr + at)
        total += tl.load(table_ptr + row * width + column, mask=column < width, other=0.0)
    tl.store(out_ptr + bag * width + column, total, mask=column < width)


def main():
    table = torch.ones(40, 50, device=DEVICE)
    ids = torch.arange(39, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 5, 5, 39], dtype=torch.int32, device=DEVICE)
    out = torch.empty(3, 50, device=DEVICE)
    sum_bags[(3,)](table, ids, starts, out, 50, BLOCK=64)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main()
