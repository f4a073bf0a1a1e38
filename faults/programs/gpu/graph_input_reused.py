"""A graph reads memory that torch has given to another tensor since: no fault, another result."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, out_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def main():
    n = 1 << 20
    x = torch.ones(n, device="cuda")
    out = torch.empty(n, device="cuda")
    scale[(n // 1024,)](x, out, n, B=1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale[(n // 1024,)](x, out, n, B=1024)
    graph.replay()
    print(out.sum().item())
    del x
    heir = torch.full((n,), 7.0, device="cuda")
    graph.replay()
    print(out.sum().item(), heir[0].item())


main()

# /// truth
# causes = ["captured pointer freed"]
# kernels = ["scale"]
# arguments = ["x_ptr"]
# lines = ["tl.load(x_ptr", "    del x"]
# fix = 'keep|alive|capture'
# never = '\bmask\b'
# options = ["--suspect"]
# needs_gpu = true
# ///
