"""A graph reads memory that was given back to the driver after the capture."""

# mypy: ignore-errors
# Recorded core dumps name lines of this file.
import torch
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, out_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def main():
    n = 16 << 20
    x = torch.randn(n, device="cuda")
    out = torch.empty(n, device="cuda")
    scale[(n // 1024,)](x, out, n, B=1024)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale[(n // 1024,)](x, out, n, B=1024)
    graph.replay()
    torch.cuda.synchronize()
    del x
    torch.cuda.empty_cache()
    graph.replay()
    print(out.sum().item())


main()

# /// truth
# causes = ["captured pointer freed"]
# kernels = ["scale"]
# arguments = ["x_ptr"]
# lines = ["tl.load(x_ptr", "    del x"]
# fix = 'keep|alive|capture'
# never = '\bmask\b'
# options = []
# needs_gpu = true
# ///
