"""A graph is replayed on a side stream right after its input was written on the default stream.

With `right` the side stream waits.
"""

import sys

import torch


def main(right):
    x = torch.zeros(1 << 16, device="cuda")
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y = x * 2 + 1
    torch.cuda.synchronize()
    for number in range(3):
        x.fill_(float(number))
        if right:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
        torch.cuda.synchronize()
    print("sum", y.sum().item())


if __name__ == "__main__":
    main("right" in sys.argv)

# /// truth
# causes = ["missing wait between streams"]
# lines = ["graph.replay()"]
# fix = 'wait'
# options = ["--suspect"]
# needs_gpu = true
# ///
