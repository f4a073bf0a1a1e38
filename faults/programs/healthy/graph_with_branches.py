"""A captured graph forks to a second stream and joins it again; its replays are in order."""

import torch


def main():
    x = torch.ones(1 << 14, device="cuda")
    graph, branch = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        doubled = x * 2
        branch.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(branch):
            more = doubled + 1
        less = doubled - 1
        torch.cuda.current_stream().wait_stream(branch)
        out = more * less
    total = 0.0
    for number in range(3):
        x.fill_(float(number))
        graph.replay()
        total += out.sum().item()
    print("total", total)


if __name__ == "__main__":
    main()

# /// truth
# needs_gpu = true
# ///
