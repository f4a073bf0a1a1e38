"""Triton kernel of `mark`: one program writes one word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.contracts.contract import Contract
from hypocenter.device.plan import PlanBuilder
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


def add(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], *, begins: bool) -> None:
    """Place a mark; `begins`: it is the first one of its plan."""
    plan.mark_gpu(
        mark_kernel,
        *(facts["runs"], facts["cell"], facts["number"]),
        grid=(1,),
        contract=contract,
        facts=facts,
        num_warps=1,
        BEGINS=begins,
    )
