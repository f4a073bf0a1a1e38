"""Gathers pages of a large key cache; page times its size leaves 32 bits from page 65,536 on.

With `right` the pages in use are the first ones.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def gather_pages(pages_ptr, table_ptr, out_ptr, page_elements, BLOCK: tl.constexpr):
    slot = tl.program_id(0)
    page = tl.load(table_ptr + slot)
    column = tl.arange(0, BLOCK)
    keys = tl.load(pages_ptr + page * page_elements + column)
    tl.store(out_ptr + slot * BLOCK + column, keys)


def main(right):
    num_pages, page_elements = 66000, 32768
    pages = torch.empty(num_pages, page_elements, dtype=torch.int8, device=DEVICE)
    used = [3, 7, 11] if right else [3, 65900, 11]
    pages[used, :128] = 1
    table = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(3, 128, dtype=torch.int8, device=DEVICE)
    gather_pages[(3,)](pages, table, out, page_elements, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["offset overflow"]
# kernels = ["gather_pages"]
# arguments = ["pages_ptr"]
# lines = ["page * page_elements"]
# fix = '64|int64'
# ///
