"""A graph reads an input that was dropped after the capture; its memory went back to the driver.

With `right` the input is kept.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def scale(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2, mask=at < n)


def main(right):
    n = 16 << 20
    x, out = torch.ones(n, device=DEVICE), torch.zeros(n, device=DEVICE)
    scale[(n // 1024,)](x, out, n, BLOCK=1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale[(n // 1024,)](x, out, n, BLOCK=1024)
    graph.replay()
    torch.cuda.synchronize()
    if not right:
        del x
        torch.cuda.empty_cache()
    graph.replay()
    print("sum", out.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["captured pointer freed"]
# kernels = ["scale"]
# arguments = ["x_ptr"]
# fix = 'keep|alive|capture'
# never = '\bmask\b'
# options = []
# needs_gpu = true
# ///
