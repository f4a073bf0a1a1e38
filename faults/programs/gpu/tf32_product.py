"""A product of float32 matrices, held against torch's; `tl.dot` cuts its operands to TF32.

Put right, it is told not to.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, out_ptr, K, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    width = tl.num_programs(1) * BLOCK
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + row * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * width + column)
        total += tl.dot(a, b)
    tl.store(out_ptr + row * width + column, total)


def main():
    torch.manual_seed(0)
    a, b = torch.randn(64, 96, device="cuda"), torch.randn(96, 64, device="cuda")
    out = torch.empty(64, 64, device="cuda")
    product[(2, 2)](a, b, out, 96, BLOCK=32)
    torch.testing.assert_close(out, a @ b, rtol=1e-4, atol=1e-4)
    print("sum", out.sum().item())


main()

# /// truth
# causes = ["operands cut to TF32"]
# kernels = ["product"]
# arguments = ["out_ptr"]
# lines = ["total += tl.dot(a, b)"]
# fix = 'input_precision'
# options = ["--suspect"]
# needs_gpu = true
# fix_old = "tl.dot(a, b)"
# fix_new = 'tl.dot(a, b, input_precision="ieee")'
# ///
