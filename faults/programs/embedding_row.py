"""Looks tokens up in a table that has fewer rows than the largest token.

With `right` all tokens have a row.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def embed(ids_ptr, table_ptr, out_ptr, width, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    row = tl.load(ids_ptr + token)
    column = tl.arange(0, BLOCK)
    value = tl.load(table_ptr + row * width + column, mask=column < width)
    tl.store(out_ptr + token * width + column, value, mask=column < width)


def main(right):
    table = torch.ones(1000, 96, device=DEVICE)
    ids = torch.arange(64, device=DEVICE)
    if not right:
        ids[17] = 1000 + (1 << 24)
    out = torch.zeros(64, 96, device=DEVICE)
    embed[(64,)](ids, table, out, 96, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["embed"]
# arguments = ["ids_ptr"]
# lines = ["tl.load(table_ptr"]
# fix = 'inside|below|<|\bat most\b|range|mask|>= 0'
# ///
