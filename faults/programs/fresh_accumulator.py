"""Adds into an output that was made by `empty`.

With `right` it was made by `zeros`.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def accumulate(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, tl.load(out_ptr + at, mask=at < n) + x, mask=at < n)


def main(right):
    x = torch.ones(700, device=DEVICE)
    out = torch.zeros(700, device=DEVICE) if right else torch.empty(700, device=DEVICE)
    accumulate[(6,)](x, out, 700, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["uninitialised read"]
# kernels = ["accumulate"]
# arguments = ["out_ptr"]
# lines = ["tl.load(out_ptr"]
# fix = 'clear|zero|write'
# never = '\bmask\b'
# options = ["--suspect"]
# ///
