"""A layer norm that reads its rows without a mask: what lies behind the last one counts too.

With `right` the width is a power of two.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def layer_norm(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + column)
    mean = tl.sum(x, axis=0) / width
    centred = x - mean
    variance = tl.sum(centred * centred, axis=0) / width
    tl.store(out_ptr + row * width + column, centred / tl.sqrt(variance + 1e-5), column < width)


def main(right):
    width = 512 if right else 500
    x = torch.randn(6, width, device=DEVICE)
    out = torch.empty_like(x)
    layer_norm[(6,)](x, out, width, BLOCK=512)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["layer_norm"]
# arguments = ["x_ptr"]
# lines = ["tl.load(x_ptr"]
# fix = 'mask|< width'
# never = 'stride|\b(make|give|let)\b[^.;]*\b(larger|more room)\b|room for'
# ///
