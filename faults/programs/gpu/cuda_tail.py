"""A kernel in CUDA C without a test of its index, launched for more elements than there are."""

# mypy: ignore-errors
import sys

import torch
from cuda_library import address, library

SOURCE = r"""
__global__ void scale(float* x, float factor) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    x[i] *= factor;
}

extern "C" void launch(float* x, float factor, int blocks) {
    scale<<<blocks, 256>>>(x, factor);
}
"""


def scaled(x, factor, right):
    lib = library(SOURCE)
    blocks = x.numel() // 256 if right else x.numel()
    lib.launch.argtypes = None
    import ctypes

    lib.launch(address(x), ctypes.c_float(factor), blocks)


def main(right):
    x = torch.ones(1 << 20, device="cuda")
    scaled(x, 2.0, right)
    torch.cuda.synchronize()
    print("sum", x.sum().item())


main("right" in sys.argv)

# /// truth
# causes = [
#   "missing tail mask",
#   "off by one",
#   "scalar out of range",
#   "buffer too small",
#   "index out of range",
# ]
# kernels = ["scale"]
# arguments = ["x", "parameter 0"]
# lines = ["x[i] *= factor"]
# fix = 'bound|<|grid|blocks|larger'
# never = 'stride'
# options = ["--again"]
# needs_gpu = true
# beside = "gpu"
# ///
