"""Four floats at a time through a view that begins at the second one. `right` passes the whole."""

# mypy: ignore-errors
import sys

import torch
from cuda_library import address, library

SOURCE = r"""
extern "C" __global__ void copy4(const float4* from, float4* to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = from[i];
}

extern "C" void launch(const float4* from, float4* to, int n) {
    copy4<<<(n + 127) / 128, 128>>>(from, to, n);
}
"""


def main(right):
    lib = library(SOURCE)
    whole = torch.arange(4096.0, device="cuda")
    part = whole[0 if right else 1 :]
    out = torch.zeros(1024, device="cuda")
    lib.launch(address(part), address(out), 256)
    torch.cuda.synchronize()
    print("sum", out.sum().item())


main("right" in sys.argv)

# /// truth
# causes = ["misalignment"]
# kernels = ["copy4"]
# arguments = ["from", "parameter 0"]
# lines = ["to[i] = from[i]"]
# fix = 'align|multiple|16'
# options = ["--again"]
# needs_gpu = true
# beside = "gpu"
# ///
