"""Row times columns in 32 bits: rows behind 2^31 elements wrap to far before the tensor."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def copy_rows(x_ptr, out_ptr, columns, B: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, B)
    tl.store(out_ptr + row * B + c, tl.load(x_ptr + row * columns + c))


def main():
    rows, columns = 40000, 65536
    x = torch.empty(rows, columns, dtype=torch.int8, device="cuda")
    out = torch.empty(rows, 64, dtype=torch.int8, device="cuda")
    copy_rows[(rows,)](x, out, columns, B=64)
    print(out.sum().item())


main()

# /// truth
# causes = ["offset overflow"]
# kernels = ["copy_rows"]
# arguments = ["x_ptr"]
# lines = ["row * columns"]
# fix = '64|int64'
# options = []
# needs_gpu = true
# ///
