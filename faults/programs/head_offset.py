"""Offsets of batch, head and position in one product of 32 bits.

With `right` there is one sequence in the batch.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def first_of_heads(x_ptr, out_ptr, num_heads, length, head_dim, BLOCK: tl.constexpr):
    batch, head = tl.program_id(0), tl.program_id(1)
    at = (batch * num_heads + head) * length * head_dim + tl.arange(0, BLOCK)
    tl.store(
        out_ptr + (batch * num_heads + head) * BLOCK + tl.arange(0, BLOCK), tl.load(x_ptr + at)
    )


def main(right):
    batch, num_heads, length, head_dim = (1 if right else 5), 32, 131072, 128
    x = torch.empty(batch, num_heads, length, head_dim, dtype=torch.int8, device=DEVICE)
    x[:, :, 0] = 1
    out = torch.zeros(batch, num_heads, 64, dtype=torch.int8, device=DEVICE)
    first_of_heads[(batch, num_heads)](x, out, num_heads, length, head_dim, BLOCK=64)
    print("sum", out.int().sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["offset overflow"]
# kernels = ["first_of_heads"]
# arguments = ["x_ptr"]
# lines = ["* length * head_dim"]
# fix = '64|int64'
# ///
