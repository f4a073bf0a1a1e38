"""A histogram by atomics; one of the bins lies far before the first."""

# mypy: ignore-errors
# Recorded core dumps name lines of this file.
import torch
import triton
import triton.language as tl


@triton.jit
def count(bins_ptr, hist_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    b = tl.load(bins_ptr + i, mask=i < n, other=0)
    tl.atomic_add(hist_ptr + b, 1, mask=i < n)


def main():
    n = 4096
    bins = torch.randint(0, 256, (n,), dtype=torch.int32, device="cuda")
    bins[1234] = -2_000_000_000
    hist = torch.zeros(256, dtype=torch.int32, device="cuda")
    count[(n // 256,)](bins, hist, n, B=256)
    print(hist.sum().item())


main()

# /// truth
# causes = ["index out of range", "sentinel consumed"]
# kernels = ["count"]
# arguments = ["bins_ptr"]
# lines = ["tl.atomic_add"]
# fix = 'inside|below|<|range|mask|>= 0'
# options = []
# needs_gpu = true
# ///
