"""The last batch of an epoch is smaller; the grid is that of the others.

With `right` it is its own.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def normalise(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    live = column < width
    x = tl.load(x_ptr + row * width + column, mask=live, other=0.0)
    tl.store(out_ptr + row * width + column, x / (tl.sum(tl.abs(x), axis=0) + 1e-6), mask=live)


def main(right):
    batch = 32
    for rows in (batch, batch, 20):
        x = torch.ones(rows, 100, device=DEVICE)
        out = torch.zeros(rows, 100, device=DEVICE)
        normalise[(rows if right else batch,)](x, out, 100, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["normalise"]
# arguments = ["x_ptr", "out_ptr"]
# lines = ["tl."]
# fix = 'grid|program|rows|mask'
# never = 'column|\b(make|give|let)\b[^.;]*\b(larger|more room)\b|room for'
# ///
