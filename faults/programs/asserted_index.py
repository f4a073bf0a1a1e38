"""A kernel of one's own asserts that its indices lie in the table; one does not.

With `right` all do.
"""

import os
import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit(debug=True)
def checked_gather(ids_ptr, x_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + at)
    tl.device_assert((ids >= 0) & (ids < num_rows), "ids lie in the table")
    tl.store(out_ptr + at, tl.load(x_ptr + ids))


def main(right):
    os.environ["TRITON_DEBUG"] = "1"
    x, out = torch.ones(40, device=DEVICE), torch.zeros(32, device=DEVICE)
    ids = torch.arange(32, dtype=torch.int32, device=DEVICE)
    if not right:
        ids[5] = 40
    checked_gather[(1,)](ids, x, out, 40, BLOCK=32)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["assertion of a kernel", "index out of range"]
# kernels = ["checked_gather"]
# fix = 'ids|index|assert|inside|below|<|\bat most\b|range|mask|>= 0'
# ///
