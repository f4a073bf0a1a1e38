"""Positions of 2 bytes an element, read by the kernel as 4 bytes: the pairs lead far outside."""

# mypy: ignore-errors
# Recorded core dumps name lines of this file.
import torch
import triton
import triton.language as tl


@triton.jit
def rotate(pos_ptr, table_ptr, out_ptr, D: tl.constexpr):
    t = tl.program_id(0)
    p = tl.load(pos_ptr.to(tl.pointer_type(tl.int32)) + t)
    d = tl.arange(0, D)
    tl.store(out_ptr + t * D + d, tl.load(table_ptr + p.to(tl.int64) * D + d))


def main():
    positions = torch.arange(256, dtype=torch.int16, device="cuda")
    table = torch.randn(4096, 64, device="cuda")
    out = torch.empty(128, 64, device="cuda")
    rotate[(128,)](positions, table, out, D=64)
    print(out.sum().item())


main()

# /// truth
# causes = ["dtype width"]
# kernels = ["rotate"]
# arguments = ["pos_ptr"]
# lines = ["tl.pointer_type(tl.int32)"]
# fix = 'width|cast|int32|type|bytes'
# options = []
# needs_gpu = true
# ///
