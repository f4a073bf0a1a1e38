"""A workspace grows after it was captured: the graph writes into the old one, which is gone.

With `right` it was large enough from the start.
"""

import sys

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def partial_sums(x_ptr, work_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(work_ptr + at, x * x, mask=at < n)


def main(right):
    n = 8 << 20
    x = torch.ones(n, device=DEVICE)
    state = {"work": torch.zeros(2 * n if right else n, device=DEVICE)}

    def workspace(size):
        if state["work"].numel() < size:
            del state["work"]
            torch.cuda.empty_cache()
            state["work"] = torch.zeros(size, device=DEVICE)
        return state["work"]

    partial_sums[(n // 1024,)](x, workspace(n), n, BLOCK=1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        partial_sums[(n // 1024,)](x, workspace(n), n, BLOCK=1024)
    workspace(2 * n)
    graph.replay()
    torch.cuda.synchronize()
    print("sum", workspace(n)[:n].sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["captured pointer freed"]
# kernels = ["partial_sums"]
# arguments = ["work_ptr"]
# fix = 'keep|alive|capture'
# never = '\bmask\b'
# options = ["--suspect"]
# needs_gpu = true
# ///
