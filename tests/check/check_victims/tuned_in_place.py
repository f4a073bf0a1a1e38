"""A tuned kernel scales in place; healthy kernels of its kind say what is to be put back."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
import sys

import torch
import triton
import triton.language as tl

CONFIGS = [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})]


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def halve(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) * 0.5, mask=at < n)


@triton.autotune(configs=CONFIGS, key=["n"], restore_value=["x_ptr"])
@triton.jit
def halve_restored(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) * 0.5, mask=at < n)


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def clip(x_ptr, n, BLOCK: tl.constexpr):
    """The same again changes nothing."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.maximum(tl.load(x_ptr + at, mask=at < n), 0.0), mask=at < n)


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def total(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


@triton.autotune(configs=CONFIGS, key=["n"], reset_to_zero=["sum_ptr"])
@triton.jit
def total_reset(x_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(sum_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))


def run(faulty):
    def grid(meta):
        return (triton.cdiv(100, meta["BLOCK"]),)

    x, added = torch.ones(100, device="cuda"), torch.zeros(1, device="cuda")
    clip[grid](x, 100)
    (total if faulty else total_reset)[grid](x, added, 100)
    (halve if faulty else halve_restored)[grid](x, 100)
    # The check leaves what the launch alone gives.
    assert (x.sum().item(), added.item()) == (50.0, 100.0)


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
