"""Prints microseconds: a replay of a graph with 20 launches, launches with 1 and 10 tensors."""

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


@triton.jit
def add_all(a, b, c, d, e, f, g, h, i, out, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    m = at < n
    x = tl.load(a + at, mask=m) + tl.load(b + at, mask=m) + tl.load(c + at, mask=m)
    x += tl.load(d + at, mask=m) + tl.load(e + at, mask=m) + tl.load(f + at, mask=m)
    x += tl.load(g + at, mask=m) + tl.load(h + at, mask=m) + tl.load(i + at, mask=m)
    tl.store(out + at, x, mask=m)


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
    ten = tensors[:10]
    add_all[(1,)](*ten, 1024, B=1024)
    many = microseconds(lambda: add_all[(1,)](*ten, 1024, B=1024), 2000)
    print(f"{microseconds(graph.replay, 200):.1f} {launch:.1f} {many:.1f}")


main()
