"""Triton kernel of `mark`: one program writes one word."""

from __future__ import annotations

from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import follow


# One compiled kernel for all launches: nothing depends on what `number` is divisible by.
@triton.jit(do_not_specialize=["number"])
def mark_kernel(runs_ptr, cell_ptr, number, OVERLAPS: tl.constexpr, BEGINS: tl.constexpr):
    """Formula: cell = (runs << 32) + number, and before it runs = runs + 1 where BEGINS.
    Shapes: runs i64 [1]; cell i64 [1].
    """
    follow(OVERLAPS)
    run = tl.load(runs_ptr)
    if BEGINS:
        run += 1
        tl.store(runs_ptr, run)
    tl.store(cell_ptr, (run << 32) + number)


def launch(plan: BoundPlan) -> None:
    """Append the mark; `begins` of its op: it is the first one of its plan."""
    plan.add_gpu(mark_kernel, grid=(1,), num_warps=1)
