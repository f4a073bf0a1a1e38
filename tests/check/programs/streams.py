"""Uses of memory without order, each beside one that is in order; `FAULT` marks the lines."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN205
import torch
import triton
import triton.language as tl


@triton.jit
def fill(x_ptr, start, value, BLOCK: tl.constexpr):
    at = start + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, value)


@triton.jit
def scale(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at) * 2)


@triton.jit
def weigh(x_ptr, factor_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * tl.load(factor_ptr))


def launches(side, waits):
    x, y = torch.zeros(256, device="cuda"), torch.zeros(256, device="cuda")
    torch.cuda.synchronize()
    fill[(2,)](x, 0, 1.0, BLOCK=128)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        scale[(2,)](x, y, BLOCK=128)  # FAULT missing wait
    torch.cuda.synchronize()


def halves(side):
    """Two streams fill a half each, which one launch says by a number."""
    x = torch.zeros(256, device="cuda")
    torch.cuda.synchronize()
    fill[(1,)](x, 0, 1.0, BLOCK=128)
    with torch.cuda.stream(side):
        fill[(1,)](x, 128, 2.0, BLOCK=128)
    torch.cuda.synchronize()


def to_host(waits):
    x = torch.ones(64).cuda()
    there = x.to("cpu", non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    total = there.sum()  # FAULT read in flight
    torch.cuda.synchronize()
    return total


def staged(waits):
    buffer = torch.empty(64, pin_memory=True)
    done = torch.cuda.Event()
    for step in range(2):
        if waits:
            done.synchronize()
        buffer.fill_(step)  # FAULT rewritten in flight
        there = buffer.to("cuda", non_blocking=True)
        done.record()
    torch.cuda.synchronize()
    return there


def mapped(waits):
    """A kernel reads the host's memory itself: there is no copy that could be waited for."""
    x, factor = torch.ones(256, device="cuda"), torch.zeros(1, pin_memory=True)
    for step in range(2):
        factor[0] = step + 1.0  # FAULT rewritten in flight
        weigh[(2,)](x, factor, BLOCK=128)
        if waits:
            torch.cuda.synchronize()
    torch.cuda.synchronize()


def scratch(side, is_kept):
    for _ in range(2):
        x = torch.ones(1024, device="cuda")  # FAULT reused in flight
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            total = x.sum()
        if is_kept:
            x.record_stream(side)
        del x
    torch.cuda.synchronize()
    return total


def replays(side, waits):
    x, graph = torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y = x + 1
    torch.cuda.synchronize()
    x.fill_(2.0)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()  # FAULT missing wait
    torch.cuda.synchronize()
    return y


def on_default_device(waits):
    """Nothing names a GPU where these tensors are made."""
    with torch.device("cuda"):
        x = torch.ones(256)
    there = x.to("cpu", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    total = there.sum()  # FAULT read in flight
    torch.set_default_device("cuda")
    y = torch.ones(256)
    torch.set_default_device(None)
    there = y.to("cpu", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    total += there.sum()  # FAULT read in flight
    torch.cuda.synchronize()
    return total


class Filled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        made = torch.zeros(256, device="cuda")
        fill[(2,)](made, 0, 2.0, BLOCK=128)
        assert (made == 2).all()
        there = made.to("cpu", non_blocking=True)
        if Filled.waits:
            torch.cuda.synchronize()
        Filled.total = there.sum()  # FAULT read in flight
        return grad * made


def backward(waits):
    x = torch.ones(256, device="cuda", requires_grad=True)
    Filled.waits = waits
    Filled.apply(x).sum().backward()
    torch.cuda.synchronize()
    return x.grad


def of_an_array():
    """Made where nothing tells of a GPU; a launch that takes it tells."""
    x = torch.frombuffer(bytearray(1024), dtype=torch.float32)
    fill[(2,)](x, 0, 1.0, BLOCK=128)
    assert (x == 1).all()


def main(is_right):
    side = torch.cuda.Stream()
    launches(side, is_right)
    halves(side)
    to_host(is_right)
    staged(is_right)
    mapped(is_right)
    scratch(side, is_right)
    replays(side, is_right)
    on_default_device(is_right)
    backward(is_right)
    of_an_array()


main(True)
main(False)
