"""Steps captured into a graph that reads and writes tensors that are kept."""

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def step(x_ptr, rate, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(x_ptr + at, x - rate * x, mask=at < n)


def main():
    x = torch.ones(1000, device=DEVICE)
    step[(4,)](x, 0.0, 1000, BLOCK=256)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step[(4,)](x, 0.5, 1000, BLOCK=256)
    for _ in range(2):
        graph.replay()
    print("is right", abs(x[0].item() - 0.5**6) < 1e-6)


if __name__ == "__main__":
    main()

# /// truth
# needs_gpu = true
# ///
