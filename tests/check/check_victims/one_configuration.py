"""An autotuned kernel: one of its three configurations leaves the mask out."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN003, ANN201
import sys

import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK": 32, "MASKED": 1}, num_warps=1),
    triton.Config({"BLOCK": 64, "MASKED": 0}, num_warps=2),
    triton.Config({"BLOCK": 128, "MASKED": 1}, num_warps=4),
    triton.Config({"BLOCK": 8, "MASKED": 1}, num_warps=1),
]


def only_masked(configs, named_args, **kwargs):
    return [config for config in configs if config.kwargs["MASKED"]]


@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    tl.static_assert(BLOCK >= 16)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n if MASKED else offs >= 0
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=mask) + 1, mask=mask)


def run(faulty):
    prune = None if faulty else {"early_config_prune": only_masked}
    tuned = triton.autotune(CONFIGS, key=["n"], restore_value=["x_ptr"], prune_configs_by=prune)
    kernel = tuned(add_one)
    x = torch.zeros(100, device="cuda")
    kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
    kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
    assert faulty or x.unique().tolist() == [2.0]


if __name__ == "__main__":
    run("healthy" not in sys.argv[1:])
