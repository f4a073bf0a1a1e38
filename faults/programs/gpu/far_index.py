"""A gather with one bad id far outside; ten healthy launches behind it take the blame."""

# mypy: ignore-errors
# Recorded core dumps name lines of this file.
import torch
import triton
import triton.language as tl


@triton.jit
def embed(ids_ptr, table_ptr, out_ptr, D: tl.constexpr):
    t = tl.program_id(0)
    i = tl.load(ids_ptr + t)
    d = tl.arange(0, D)
    tl.store(out_ptr + t * D + d, tl.load(table_ptr + i * D + d))


@triton.jit
def scale(x_ptr, y_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=m) * 2, mask=m)


def main():
    ids = torch.randint(0, 32000, (256,), device="cuda")
    ids[77] = 1 << 40
    table = torch.randn(32000, 128, device="cuda")
    out = torch.empty(256, 128, device="cuda")
    embed[(256,)](ids, table, out, D=128)
    a = torch.randn(4096, device="cuda")
    b = torch.empty_like(a)
    for _ in range(10):
        scale[(4,)](a, b, 4096, B=1024)
        a, b = b, a
    print(out.sum().item())


main()

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["embed"]
# arguments = ["ids_ptr"]
# lines = ["tl.load(table_ptr"]
# fix = 'inside|below|<|range|mask|>= 0'
# options = []
# needs_gpu = true
# ///
