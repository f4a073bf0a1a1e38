"""Tiles in so many stages that they want more shared memory than a block may have."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr):
    i = tl.arange(0, B)
    c = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        a = tl.load(a_ptr + i[:, None] * K + k + i[None, :])
        b = tl.load(b_ptr + (k + i[:, None]) * B + i[None, :])
        c += tl.dot(a, b)
    tl.store(c_ptr + i[:, None] * B + i[None, :], c)


def main():
    a, b = torch.randn(128, 4096, device="cuda"), torch.randn(4096, 128, device="cuda")
    c = torch.empty(128, 128, device="cuda")
    product[(1,)](a, b, c, 4096, B=128, num_stages=8, num_warps=8)
    print(c.sum().item())


main()

# /// truth
# causes = ["shared memory over the limit"]
# kernels = ["product"]
# fix = 'smaller|tile|block|stage|shared'
# options = []
# needs_gpu = true
# ///
