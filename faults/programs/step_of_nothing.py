"""Walks towards an end in steps that a tensor says; one of them is 0.

With `right` none is.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def walk_to(steps_ptr, out_ptr, end):
    row = tl.program_id(0)
    step = tl.load(steps_ptr + row)
    at = 0
    while at < end:
        at += step
    tl.store(out_ptr + row, at)


def main(right):
    steps = torch.tensor([3, 4, 1 if right else 0, 2], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    walk_to[(4,)](steps, out, 100)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["endless loop"]
# kernels = ["walk_to"]
# lines = ["at"]
# fix = 'step|end|loop|while|at\b'
# options = ["--deadline", "15"]
# ///
