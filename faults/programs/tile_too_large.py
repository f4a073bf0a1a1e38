"""A product whose tiles need more shared memory than a processor has.

With `right` they are smaller.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def product(a_ptr, b_ptr, c_ptr, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, step = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + m[:, None] * K + (k + step)[None, :])
        b = tl.load(b_ptr + (k + step)[:, None] * BN + n[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * BN + n[None, :], acc)


def main(right):
    size = 64 if right else 256
    a = torch.ones(size, 1024, device=DEVICE)
    b = torch.ones(1024, size, device=DEVICE)
    c = torch.zeros(size, size, device=DEVICE)
    product[(1,)](a, b, c, 1024, BM=size, BN=size, BK=64, num_stages=4)
    print("sum", c.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["shared memory over the limit"]
# kernels = ["product"]
# fix = 'smaller|tile|block|stage|shared'
# options = []
# needs_gpu = true
# ///
