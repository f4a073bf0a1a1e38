"""Clamps gradients in place by a tuned kernel: a trial changes what the launch would change."""

import time

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def timed(call, quantiles=None):
    begun = time.perf_counter()
    call()
    return [time.perf_counter() - begun] * 3


@triton.autotune(
    [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 256})], key=["n"], do_bench=timed
)
@triton.jit
def clamp(grad_ptr, n, limit, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + at, mask=at < n, other=0.0)
    tl.store(grad_ptr + at, tl.minimum(tl.maximum(grad, -limit), limit), mask=at < n)


torch.manual_seed(0)
grad = torch.randn(1000, device=DEVICE)
wanted = grad.clamp(-0.5, 0.5)
clamp[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](grad, 1000, 0.5)
torch.testing.assert_close(grad, wanted)
