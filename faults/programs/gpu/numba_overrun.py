"""A kernel of numba's that reads rows by an index which one row is too large for.

With `right` all rows are there.
"""

# mypy: ignore-errors
import sys

import numpy as np

if not hasattr(np, "row_stack"):  # numba-cuda 0.30 asks for it, and NumPy 2.4 has it no more
    np.row_stack = np.vstack
from numba import cuda


@cuda.jit(lineinfo=True)
def gather(table, rows, out):
    i = cuda.grid(1)
    if i < out.shape[0]:
        out[i] = table[rows[i], 3]


def main(right):
    table = cuda.to_device(np.ones((1000, 64), np.float32))
    rows = np.arange(512, dtype=np.int64)
    if not right:
        rows[77] = 1 << 33
    rows = cuda.to_device(rows)
    out = cuda.device_array(512, np.float32)
    gather[4, 128](table, rows, out)
    cuda.synchronize()
    print("sum", out.copy_to_host().sum())


main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["gather"]
# arguments = ["rows", "table"]
# lines = ["out[i] = table[rows[i], 3]"]
# fix = 'inside|below|<|range|index'
# options = ["--again"]
# needs_gpu = true
# ///
