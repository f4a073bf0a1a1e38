"""A weight whose storage was freed in place, as sharded training does, and not made again.

With `right` it was.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def dot(w_ptr, x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr, tl.sum(w * tl.load(x_ptr + at, mask=at < n, other=0.0)))


def main(right):
    w, x, out = (torch.ones(k, device=DEVICE) for k in (200, 200, 1))
    num_bytes = w.untyped_storage().nbytes()
    w.untyped_storage().resize_(0)
    if right:
        w.untyped_storage().resize_(num_bytes)
        w.fill_(1)
    dot[(1,)](w, x, out, 200, BLOCK=256)
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["null pointer", "use after free"]
# kernels = ["dot"]
# arguments = ["w_ptr"]
# fix = 'pass|keep|alive|storage|tensor'
# needs_gpu = true
# ///
