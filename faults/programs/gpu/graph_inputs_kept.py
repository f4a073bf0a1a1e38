"""Healthy graphs: tensors between launches go, one reads another's output, some go themselves."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, out_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def scaled(x, n):
    out = torch.empty_like(x)
    scale[(n // 1024,)](x, out, n, B=1024)
    return out


def graph_of(x, n, times, pool=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(times):
            x = scaled(x, n)
    return graph, x


def main():
    n = 1 << 20
    x = torch.ones(n, device="cuda")
    scaled(x, n)
    first, four = graph_of(x, n, 2)
    second, eight = graph_of(four, n, 1, first.pool())
    third, sixteen = graph_of(eight, n, 1)
    del four
    for _ in range(100):
        first.replay()
        second.replay()
        third.replay()
    print(eight[0].item(), sixteen[0].item())
    y = torch.ones(n, device="cuda")
    for _ in range(20):  # captured, replayed and gone before its input is
        graph, result = graph_of(y, n, 1)
        graph.replay()
        print(result[0].item(), end=" ")
        del graph, result
        y = torch.ones(n, device="cuda")
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda()
    sample = torch.randn(32, 64, device="cuda")
    graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    for _ in range(5):
        graphed(torch.randn(32, 64, device="cuda")).sum().backward()
    print("done")


main()

# /// truth
# options = ["--suspect"]
# needs_gpu = true
# ///
