"""Triton kernel of `mix`: one program is a stretch of one token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.contracts.contract import Contract
from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow

_BLOCK = 256


@triton.jit
def mix_kernel(
    x_ptr, rows_ptr, places_ptr, weights_ptr, shared_ptr, counts_ptr, width, x_pitch, rows_pitch,
    shared_pitch, HAS_SHARED: tl.constexpr, ACCUMULATE: tl.constexpr, OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr, NUM_USED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(NUM_USED):
        place = as_offset(tl.load(places_ptr + row * NUM_USED + slot), WIDE)
        weight = tl.load(weights_ptr + row * (NUM_USED + 1) + slot)
        part = tl.load(rows_ptr + place * rows_pitch + column, mask=inside, other=0.0)
        total = tl.fma(part, weight, total)
    row = as_offset(row, WIDE)
    if HAS_SHARED:
        weight = tl.load(weights_ptr + row * (NUM_USED + 1) + NUM_USED)
        part = tl.load(shared_ptr + row * shared_pitch + column, mask=inside, other=0.0)
        total = tl.fma(part, weight, total)
    at = x_ptr + row * x_pitch + column
    if ACCUMULATE:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)


def add_mix(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], accumulate: bool
) -> None:
    """Append mix: one program for 256 columns of each token of the bucket."""
    x, rows, shared = facts["x"], facts["expert_rows"], facts["shared"]
    given = rows if shared is None else shared
    plan.add_gpu(
        mix_kernel,
        *(x, rows, facts["places"], facts["weights"], given, facts["counts"], facts["width"]),
        *(x.strides[0], rows.strides[0], given.strides[0]),
        grid=(x.shape[0], triton.cdiv(facts["width"], _BLOCK)),
        contract=contract,
        facts=facts,
        HAS_SHARED=shared is not None,
        ACCUMULATE=accumulate,
        NUM_USED=facts["places"].shape[1],
        BLOCK=_BLOCK,
    )
