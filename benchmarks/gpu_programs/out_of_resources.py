"""A tile that wants more shared memory than a block may have."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, c_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    square = i[:, None] * B + i[None, :]
    c = tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square))
    tl.store(c_ptr + square, c)


def main():
    a, b, c = (torch.randn(512, 512, device="cuda") for _ in range(3))
    product[(1,)](a, b, c, B=512, num_warps=16)
    print(c.sum().item())


main()
