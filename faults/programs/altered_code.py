"""A process changes the code that Triton makes, as a wrong entry of a cache would.

With `right` it leaves the code alone.
"""

import re
import sys
import tempfile

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def squares(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x * x, mask=at < n)


def alter():
    from triton.backends.nvidia.compiler import CUDABackend

    make = CUDABackend.make_ptx

    def make_wrong(self, *args):
        return re.sub(r"\bmul((?:\.rn)?\.f32)", r"add\1", make(self, *args), count=1)

    CUDABackend.make_ptx = make_wrong
    triton.knobs.cache.dir = tempfile.mkdtemp()


def main(right):
    if not right:
        alter()
    x = torch.randn(1000, device=DEVICE)
    out = torch.zeros_like(x)
    squares[(8,)](x, out, 1000, BLOCK=128)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["wrong code of the compiler"]
# kernels = ["squares"]
# arguments = ["out_ptr"]
# lines = ["tl.store(out_ptr"]
# fix = 'cache|compile|Triton'
# options = ["--suspect"]
# needs_gpu = true
# ///
