"""A number is read on the host while a graph is captured.

With `right` it is read afterwards.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def add_one(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)


def main(right):
    x = torch.zeros(64, device=DEVICE)
    add_one[(1,)](x, BLOCK=64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add_one[(1,)](x, BLOCK=64)
        if not right:
            print("first", x[0].item())
    graph.replay()
    print("sum", x.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["call not allowed during capture"]
# lines = [".item()"]
# fix = 'capture|after|before|outside'
# options = []
# needs_gpu = true
# ///
