"""What the watch of the driver costs: microseconds a launch of torch and of CUDA C."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "faults" / "programs" / "gpu"))
from cuda_library import address, library

SOURCE = r"""
__global__ void nothing(float* x, int n) {}
extern "C" void many(float* x, int times) {
    for (int i = 0; i < times; i++) nothing<<<1, 32>>>(x, i);
}
extern "C" void one(float* x) { nothing<<<1, 32>>>(x, 0); }
"""
TIMES = 20000


def microseconds(call, times):
    best = 1e9
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            call()
        best = min(best, time.perf_counter() - begun)
        torch.cuda.synchronize()
    return best / times * 1e6


def main():
    lib = library(SOURCE)
    x = torch.zeros(64, device="cuda")
    where = address(x)
    torch_op = microseconds(lambda: x.add_(1.0), 500)
    python = microseconds(lambda: lib.one(where), 500)
    inside = microseconds(lambda: lib.many(where, 500), 1) / 500
    print(f"torch add_ {torch_op:.2f} us, CUDA C {python:.2f} us, in a loop of C {inside:.2f} us")


main()
