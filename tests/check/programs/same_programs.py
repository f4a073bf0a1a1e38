"""An autotuned kernel of six configurations, of which only the blocks make other programs."""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=num_warps, num_stages=num_stages)
    for block in (32, 64)
    for num_warps, num_stages in ((2, 2), (4, 2), (4, 3))
]


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def plain(x_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n if BLOCK == 32 else offs >= 0
    tl.store(x_ptr + offs, 1.0, mask=mask)


@triton.autotune(CONFIGS, key=["n"])
@triton.heuristics({"LANES": lambda given: given["num_warps"] * 32})
@triton.jit
def by_warps(x_ptr, n, BLOCK: tl.constexpr, LANES: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) % LANES
    tl.store(x_ptr + offs, 1.0, mask=offs < n)


@triton.autotune(CONFIGS, key=["n"])
@triton.jit
def sees_warps(x_ptr, n, BLOCK: tl.constexpr, num_warps: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, num_warps, mask=offs < n)


if __name__ == "__main__":
    x = torch.zeros(100, device="cuda")
    for kernel in (plain, by_warps, sees_warps):
        kernel[lambda meta: (triton.cdiv(100, meta["BLOCK"]),)](x, 100)
