"""Launches that Triton refuses before they run, compiled for a GPU that is not there.

The driver stands for CUDA's: it has the limits of an H200, and loads nothing. It is installed, as
a driver is: its folder is the second argument.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
import sys

import torch
import triton
import triton.language as tl

sys.path.append(sys.argv[2])


@triton.jit
def tile_product(a_ptr, b_ptr, c_ptr, K, B: tl.constexpr):
    i = tl.arange(0, B)
    at = i[:, None] * B + i[None, :]
    total = tl.zeros((B, B), tl.float32)
    for k in range(0, K, B):
        total += tl.dot(tl.load(a_ptr + at + k), tl.load(b_ptr + at + k))
    tl.store(c_ptr + at, total)


@triton.jit
def _half_of(x):
    return x.to(tl.int32) / tl.zeros((3,), tl.float32)


@triton.jit
def halves(x_ptr, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x_ptr + i, _half_of(i))


CAPTURING = "Triton Error [CUDA]: operation not permitted when stream is capturing"


def main(case):
    from no_gpu_driver import Driver

    threads = 128 if case == "threads" else 1024
    triton.runtime.driver.set_active(Driver(threads, CAPTURING if case == "capture" else ""))
    x = torch.zeros(256 * 256, dtype=torch.float32)
    if case == "compile":
        halves[(1,)](x, B=16)
    elif case == "resources":
        tile_product[(1,)](x, x, x, 256, B=128, num_stages=4)
    else:
        tile_product[(1,)](x, x, x, 16, B=16, num_warps=8)


if __name__ == "__main__":
    main(sys.argv[1])
