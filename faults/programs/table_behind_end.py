"""Attention over paged keys; the loop takes one page more than the sequence has.

With `right` it stops at the last one.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def sum_pages(
    pages_ptr, table_ptr, lengths_ptr, out_ptr, max_pages, MORE: tl.constexpr, PAGE: tl.constexpr
):
    sequence = tl.program_id(0)
    num_pages = (tl.load(lengths_ptr + sequence) + PAGE - 1) // PAGE
    total = 0.0
    for at in range(num_pages + MORE):
        page = tl.load(table_ptr + sequence * max_pages + at)
        total += tl.sum(tl.load(pages_ptr + page * PAGE + tl.arange(0, PAGE)), axis=0)
    tl.store(out_ptr + sequence, total)


def main(right):
    pages = torch.ones(40, 16, device=DEVICE)
    table = torch.full((3, 4), 1 << 26, dtype=torch.int32, device=DEVICE)
    table[:, :2] = torch.arange(6, dtype=torch.int32, device=DEVICE).view(3, 2)
    lengths = torch.tensor([32, 20, 30], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, device=DEVICE)
    sum_pages[(3,)](pages, table, lengths, out, 4, MORE=0 if right else 1, PAGE=16)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = [
#   "index out of range",
#   "sentinel consumed",
#   "off by one",
#   "buffer too small",
#   "scalar out of range",
# ]
# kernels = ["sum_pages"]
# arguments = ["table_ptr", "MORE", "lengths_ptr"]
# lines = ["tl.load("]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0|MORE|earlier|page|loop|entry|length'
# ///
