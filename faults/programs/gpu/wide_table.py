"""Rows of a table with more than 2**31 elements, by an index on the GPU whose product wraps.

With `right` the product has 64 bits.
"""

# mypy: ignore-errors
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def copy_rows(src_ptr, ids_ptr, dst_ptr, width, IS_WIDE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + place)
    if IS_WIDE:
        row = row.to(tl.int64)
    values = tl.load(src_ptr + row * width + column, mask=column < width)
    tl.store(dst_ptr + place * width + column, values, mask=column < width)


def main(right):
    src = torch.zeros(2_200_000, 1024, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([5, 2_199_990, 7], device="cuda", dtype=torch.int32)
    dst = torch.empty(3, 1024, device="cuda", dtype=torch.bfloat16)
    copy_rows[(3,)](src, ids, dst, 1024, IS_WIDE=right, BLOCK=1024)
    torch.cuda.synchronize()
    print("sum", dst.float().sum().item())


main("right" in sys.argv)

# /// truth
# causes = ["offset overflow"]
# kernels = ["copy_rows"]
# arguments = ["src_ptr"]
# lines = ["row * width"]
# fix = '64|int64'
# options = ["--again"]
# needs_gpu = true
# ///
