"""Launches as many programs as whole blocks fit, into a result that began as zeros.

With `right` the number is rounded up.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scale(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x * 2, mask=i < n)


def main(right):
    n, block = 1000, 128
    x = torch.randn(n, device=DEVICE)
    y = torch.zeros_like(x)
    num_blocks = triton.cdiv(n, block) if right else n // block
    scale[(num_blocks,)](x, y, n, BLOCK=block)
    assert torch.allclose(y, x * 2)


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["grid too small"]
# kernels = ["scale"]
# arguments = ["y_ptr"]
# lines = ["scale[("]
# fix = 'Launch|grid|program'
# never = '\bmask\b'
# options = ["--suspect"]
# ///
