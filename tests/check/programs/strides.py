"""Tensors that are expanded or not contiguous, given to kernels that take them for packed."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, 1.0 + tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


@triton.jit
def set_rows(x_ptr, stride_m, stride_n, N, value, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    at = x_ptr + tl.program_id(0) * stride_m + cols * stride_n
    tl.store(at, tl.program_id(0) + value, mask=cols < N)


if __name__ == "__main__":
    bias = torch.zeros(100, device="cuda").expand(4, 100)
    add_one[(4,)](bias, bias.numel(), BLOCK=128)
    set_rows[(4,)](bias, *bias.stride(), 100, 1.0, BLOCK=128)
    transposed = torch.empty(8, 16, device="cuda").t()
    set_rows[(16,)](transposed, *transposed.stride(), 7, 1.0, BLOCK=8)
