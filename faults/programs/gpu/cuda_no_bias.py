"""A kernel in CUDA C adds a bias that nobody has given: a null pointer. `right` gives one."""

# mypy: ignore-errors
import sys

import torch
from cuda_library import address, library

SOURCE = r"""
extern "C" __global__ void add_bias(float* x, const float* bias, int width, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        x[i] += bias[i % width];
}

extern "C" void launch(float* x, const float* bias, int width, int n) {
    add_bias<<<(n + 127) / 128, 128>>>(x, bias, width, n);
}
"""


def main(right):
    lib = library(SOURCE)
    x = torch.ones(256, 64, device="cuda")
    bias = torch.ones(64, device="cuda") if right else None
    lib.launch(address(x), address(bias) if bias is not None else None, 64, x.numel())
    torch.cuda.synchronize()
    print("sum", x.sum().item())


main("right" in sys.argv)

# /// truth
# causes = ["null pointer"]
# kernels = ["add_bias"]
# arguments = ["bias", "parameter 1"]
# lines = ["x[i] += bias"]
# fix = 'pass|give|null|pointer|memory'
# never = '\bmask\b'
# options = ["--again"]
# needs_gpu = true
# beside = "gpu"
# ///
