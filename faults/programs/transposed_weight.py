"""A matrix times a vector; the weight is a transposed view, whose strides are passed by position.

With `right` both strides are those of the view.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def matvec(w_ptr, x_ptr, y_ptr, num_columns, row_stride, column_stride, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    live = column < num_columns
    w = tl.load(w_ptr + row * row_stride + column * column_stride, mask=live, other=0.0)
    y = tl.sum(w * tl.load(x_ptr + column, mask=live, other=0.0), axis=0)
    tl.store(y_ptr + row, y)


def main(right):
    w = torch.ones(48, 200, device=DEVICE).t()  # 200 rows of 48 columns
    x, y = torch.ones(48, device=DEVICE), torch.zeros(200, device=DEVICE)
    strides = (w.stride(0), w.stride(1)) if right else (w.stride(1), w.stride(0))
    matvec[(200,)](w, x, y, 48, *strides, BLOCK=64)
    print("sum", y.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["wrong stride", "scalar out of range"]
# kernels = ["matvec"]
# arguments = ["w_ptr", "row_stride", "column_stride"]
# lines = ["tl.load(w_ptr"]
# fix = 'stride'
# never = '\bmask\b|\b(make|give|let)\b[^.;]*\b(larger|more room)\b|room for'
# ///
