"""Memory of cudaMalloc that is freed before the launch that reads it. `right` frees it after."""

# mypy: ignore-errors
import ctypes
import sys

import torch
from cuda_library import address, library

SOURCE = r"""
#include <cuda_runtime.h>
extern "C" __global__ void copy(const float* from, float* to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = from[i];
}

extern "C" void* take(size_t bytes) { void* p = 0; cudaMalloc(&p, bytes); return p; }
extern "C" void give_back(void* p) { cudaFree(p); }
extern "C" void launch(const float* from, float* to, int n) {
    copy<<<(n + 127) / 128, 128>>>(from, to, n);
}
"""


def main(right):
    lib = library(SOURCE)
    lib.take.restype = ctypes.c_void_p
    n = 1 << 20
    out = torch.zeros(n, device="cuda")
    staging = lib.take(ctypes.c_size_t(64 << 20))
    if not right:
        lib.give_back(ctypes.c_void_p(staging))
    lib.launch(ctypes.c_void_p(staging), address(out), n)
    torch.cuda.synchronize()
    if right:
        lib.give_back(ctypes.c_void_p(staging))
    print("shape", tuple(out.shape))


main("right" in sys.argv)

# /// truth
# causes = ["use after free"]
# kernels = ["copy"]
# arguments = ["from", "parameter 0"]
# lines = ["to[i] = from[i]"]
# fix = 'keep|alive|free'
# never = '\bmask\b'
# options = ["--again"]
# needs_gpu = true
# beside = "gpu"
# ///
