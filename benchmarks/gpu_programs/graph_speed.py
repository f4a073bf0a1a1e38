"""Prints microseconds of a replay of a graph with 20 launches, and of a launch."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import time

import torch
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


def microseconds(do, number):
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(number):
            do()
        found.append((time.perf_counter() - begun) / number)
    torch.cuda.synchronize()
    return min(found) * 1e6


def main():
    tensors = [torch.zeros(1024, device="cuda") for _ in range(20)]
    add[(1,)](tensors[0], 1024, B=1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x in tensors:
            add[(1,)](x, 1024, B=1024)
    launch = microseconds(lambda: add[(1,)](tensors[0], 1024, B=1024), 2000)
    print(f"{microseconds(graph.replay, 200):.1f} {launch:.1f}")


main()
