"""A launch of 2,048 threads a block that nobody checks; torch reports it at its next call.

With `right` it has 256.
"""

# mypy: ignore-errors
import sys

import torch
from cuda_library import address, library

SOURCE = r"""
__global__ void fill(float* out, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        out[i] = value;
}

extern "C" void launch(float* out, int n, int threads) {
    fill<<<(n + threads - 1) / threads, threads>>>(out, 1.0f, n);
}
"""


def main(right):
    lib = library(SOURCE)
    out = torch.zeros(100000, device="cuda")
    lib.launch(address(out), out.numel(), 256 if right else 2048)
    total = (out * 2).sum()
    print("sum", total.item())


main("right" in sys.argv)

# /// truth
# causes = ["threads over the limit"]
# kernels = ["fill"]
# arguments = ["block"]
# fix = 'thread|1,?024|block'
# options = ["--again"]
# needs_gpu = true
# beside = "gpu"
# ///
