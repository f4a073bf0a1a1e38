"""A product whose loop over the depth is not masked: the last step leaves both operands.

With `right` the depth is a multiple of the step.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=m[:, None] < M, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=n[None, :] < N, other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc, mask=(m[:, None] < M) & (n[None, :] < N))


def main(right):
    m, n, k = 48, 40, (96 if right else 100)
    a, b = torch.ones(m, k, device=DEVICE), torch.ones(k, n, device=DEVICE)
    c = torch.zeros(m, n, device=DEVICE)
    matmul[(3, 2)](a, b, c, m, n, k, BM=16, BN=32, BK=32)
    print("sum", c.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing tail mask", "off by one", "scalar out of range", "buffer too small"]
# kernels = ["matmul"]
# arguments = ["a_ptr", "b_ptr", "K"]
# lines = ["tl.load("]
# fix = '< K`|< K\)'
# never = '< [MN]\b|\b(make|give|let)\b[^.;]*\b(larger|more room)\b|room for'
# ///
