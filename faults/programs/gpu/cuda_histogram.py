"""A histogram in CUDA C whose bins are multiplied by their number: counts far behind the end.

`bin * num_bins` where the bin alone is the index. With `right` it is.
"""

# mypy: ignore-errors
import sys

import torch
from cuda_library import address, library

SOURCE = r"""
extern "C" __global__ void histogram(const int* bins, int* counts, int n, size_t num_bins) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        atomicAdd(&counts[bins[i] * num_bins], 1);
}

extern "C" void launch(const int* bins, int* counts, int n, size_t num_bins) {
    histogram<<<(n + 255) / 256, 256>>>(bins, counts, n, num_bins);
}
"""


def main(right):
    lib = library(SOURCE)
    bins = torch.randint(0, 65536, (100000,), device="cuda", dtype=torch.int32)
    counts = torch.zeros(65536, device="cuda", dtype=torch.int32)
    num = 1 if right else 65536
    lib.launch(address(bins), address(counts), len(bins), num)
    torch.cuda.synchronize()
    print("sum", counts.sum().item())


main("right" in sys.argv)

# /// truth
# causes = ["index out of range", "scalar out of range", "wrong stride"]
# kernels = ["histogram"]
# arguments = ["counts", "bins", "num_bins", "parameter 1", "parameter 3"]
# lines = ["atomicAdd(&counts["]
# fix = 'inside|index|num_bins|bound'
# options = ["--again"]
# needs_gpu = true
# beside = "gpu"
# ///
