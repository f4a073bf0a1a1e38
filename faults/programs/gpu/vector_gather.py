"""A gather of many ids a program, one of them far outside; each lane goes by an id of its own."""

# mypy: ignore-errors
# Recorded core dumps name lines of this file.
import torch
import triton
import triton.language as tl


@triton.jit
def pick(ids_ptr, values_ptr, out_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    at = tl.load(ids_ptr + i, mask=i < n, other=0)
    tl.store(out_ptr + i, tl.load(values_ptr + at, mask=i < n), mask=i < n)


def main():
    n = 10_000
    ids = torch.randint(0, 5000, (n,), device="cuda")
    ids[7777] = 1 << 36
    values = torch.randn(5000, device="cuda")
    out = torch.empty(n, device="cuda")
    pick[(triton.cdiv(n, 1024),)](ids, values, out, n, B=1024)
    print(out.sum().item())


main()

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["pick"]
# arguments = ["ids_ptr"]
# lines = ["tl.load(values_ptr"]
# fix = 'inside|below|<|range|mask|>= 0'
# options = []
# needs_gpu = true
# ///
