"""A kernel is launched first while a graph is captured: Triton compiles and loads it then."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, out_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * 3, mask=i < n)


def main():
    x, out = torch.ones(4096, device="cuda"), torch.empty(4096, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale[(4,)](x, out, 4096, B=1024)
    graph.replay()
    print(out[0].item())


main()

# /// truth
# options = ["--suspect"]
# needs_gpu = true
# ///
