"""Prints milliseconds of a training step: layers of torch, between them a gate of Triton's.

Arguments: width, rows and layers, of which there are fewer where no GPU is.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, ANN205
import statistics
import sys
import time

import torch
import triton
import triton.language as tl

NUM_WARM, NUM_STEPS = 5, 40
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@triton.jit
def gate(x_ptr, y_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    tl.store(y_ptr + i, x / (1 + tl.exp(-x)), mask=i < n)


@triton.jit
def gate_back(x_ptr, dy_ptr, dx_ptr, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(x_ptr + i, mask=i < n).to(tl.float32)
    s = 1 / (1 + tl.exp(-x))
    dy = tl.load(dy_ptr + i, mask=i < n).to(tl.float32)
    tl.store(dx_ptr + i, dy * s * (1 + x * (1 - s)), mask=i < n)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        gate[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), B=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        gate_back[(triton.cdiv(x.numel(), 1024),)](x, dy.contiguous(), dx, x.numel(), B=1024)
        return dx


def milliseconds(step):
    began = time.perf_counter()
    step()
    if ON_GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def main():
    width, num_rows, num_layers = map(int, sys.argv[1:] or (2048, 8192, 12))
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    layers = [torch.nn.Linear(width, width, device=DEVICE, dtype=dtype) for _ in range(num_layers)]
    weights = [weight for layer in layers for weight in layer.parameters()]
    optimiser = torch.optim.SGD(weights, lr=1e-3)
    x = torch.randn(num_rows, width, device=DEVICE, dtype=dtype)

    def step():
        y = x
        for layer in layers:
            y = Gate.apply(layer(y))
        optimiser.zero_grad()
        (y - x).square().mean().backward()
        optimiser.step()

    took = [milliseconds(step) for _ in range(NUM_WARM + NUM_STEPS)]
    print(f"{statistics.median(took[NUM_WARM:]):.3f}")


main()
