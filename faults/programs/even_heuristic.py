"""Leaves the mask out where a heuristic says that blocks come out even; it compares the wrong way.

With `right` it looks at the remainder.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def comes_out_even(given):
    if given["RIGHT"]:
        return given["n"] % given["BLOCK"] == 0
    return given["n"] >= given["BLOCK"]


@triton.heuristics({"EVEN": comes_out_even})
@triton.jit
def add_vectors(
    x_ptr, y_ptr, out_ptr, n, RIGHT: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))
    else:
        live = at < n
        total = tl.load(x_ptr + at, mask=live) + tl.load(y_ptr + at, mask=live)
        tl.store(out_ptr + at, total, mask=live)


def main(right):
    x, y, out = (torch.ones(1000, device=DEVICE) for _ in range(3))
    add_vectors[(8,)](x, y, out, 1000, RIGHT=right, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["add_vectors"]
# lines = ["x_ptr + at) + tl.load(y_ptr"]
# fix = 'mask|heuristic|EVEN'
# ///
