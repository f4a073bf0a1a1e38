"""Adds two blocks of shapes that do not go together: Triton refuses it.

With `right` they do.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_blocks(x_ptr, y_ptr, A: tl.constexpr, B: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, A))
    y = tl.load(y_ptr + tl.arange(0, B))
    tl.store(x_ptr + tl.arange(0, A), x + y)


def main(right):
    x, y = torch.ones(64, device=DEVICE), torch.ones(64, device=DEVICE)
    add_blocks[(1,)](x, y, A=64, B=64 if right else 32)
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["kernel does not compile"]
# kernels = ["add_blocks"]
# lines = ["x + y"]
# fix = 'shape|compile|block|A\b|B\b'
# options = []
# ///
