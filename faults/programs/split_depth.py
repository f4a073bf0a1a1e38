"""A product split over its depth; all parts store into the same output.

With `right` they add into it.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def split_matvec(w_ptr, x_ptr, y_ptr, K, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0), tl.program_id(1)
    k = part * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + row * K + k, mask=k < K, other=0.0)
    y = tl.sum(w * tl.load(x_ptr + k, mask=k < K, other=0.0), axis=0)
    if ADDS:
        tl.atomic_add(y_ptr + row, y)
    else:
        tl.store(y_ptr + row, y)


def main(right):
    w, x = torch.ones(24, 300, device=DEVICE), torch.ones(300, device=DEVICE)
    y = torch.zeros(24, device=DEVICE)
    split_matvec[(24, 3)](w, x, y, 300, ADDS=right, BLOCK=128)
    print("sum", y.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["race between programs"]
# kernels = ["split_matvec"]
# arguments = ["y_ptr"]
# lines = ["tl.store(y_ptr"]
# fix = 'atomic|one program'
# options = ["--suspect"]
# ///
