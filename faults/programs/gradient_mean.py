"""The gradient of a centred row: a sum takes the lanes that its load leaves out.

With `right` the load gives them 0.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def centre_gradient(grad_ptr, out_ptr, width, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * width + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < width
    if OTHER:
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0)
    else:
        grad = tl.load(grad_ptr + at, mask=mask)
    tl.store(out_ptr + at, grad - tl.sum(grad, axis=0) / width, mask=mask)


def main(right):
    grad = torch.ones(4, 100, device=DEVICE)
    out = torch.zeros(4, 100, device=DEVICE)
    centre_gradient[(4,)](grad, out, 100, OTHER=right, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["undefined lane"]
# kernels = ["centre_gradient"]
# arguments = ["grad_ptr"]
# lines = ["tl.load(grad_ptr"]
# fix = 'other'
# options = ["--suspect"]
# ///
