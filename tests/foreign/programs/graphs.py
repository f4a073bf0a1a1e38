"""A launch in a graph that is replayed: over a tensor that is there, or not any more.

There is no GPU: the driver is the one of the tests, whose folder is the second argument.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import sys

import torch
import triton
import triton.language as tl

sys.path.append(sys.argv[2])


@triton.jit
def scale(x_ptr, out_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def main(case):
    from pretended.pretend_graphs import in_private_pool, install

    done = install()
    x = torch.ones(1000, device="cuda")
    out = torch.empty(1000, device="cuda")
    if case != "compiled":
        scale[(4,)](x, out, 1000, B=256)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = torch.empty(1000, device="cuda")
        scale[(4,)](x, between, 1000, B=256)  # captured
        scale[(4,)](in_private_pool(between), out, 1000, B=256)
        del between
    graph.replay()
    if case == "freed":
        del x
    elif case == "resized":
        x.untyped_storage().resize_(0)
    graph.replay()  # the last one
    print(done.num_launched, done.num_captured, done.num_replays)


if __name__ == "__main__":
    main(sys.argv[1])
