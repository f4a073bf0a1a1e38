"""Triton kernels of `layer_norm`: one program is one row, or some groups of its codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.linear.quantise_gpu import codes_form, columns_of, store_codes
from hypocenter.kernels.shared_gpu import as_offset, follow


@triton.jit
def _moments(x, live, width, eps):
    """The mean of a row, all of which x is, and what the row less that is multiplied by."""
    mean = tl.sum(x, axis=0) / width
    centred = tl.where(live, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / width
    return mean, 1.0 / tl.sqrt(variance + eps)


@triton.jit(do_not_specialize=["count"])
def layer_norm_kernel(
    x_ptr, counts_ptr, weight_ptr, bias_ptr, out_ptr, count, eps, width, x_stride, out_stride,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    row = as_offset(row, WIDE)
    column = tl.arange(0, BLOCK)
    live = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=live, other=0.0)
    mean, inverse = _moments(x, live, width, eps)
    out = (x - mean) * inverse
    out = out * tl.load(weight_ptr + column, mask=live, other=0.0)
    out = out + tl.load(bias_ptr + column, mask=live, other=0.0)
    tl.store(out_ptr + row * out_stride + column, out, mask=live)


@triton.jit(do_not_specialize=["count"])
def layer_norm_codes_kernel(
    x_ptr, counts_ptr, weight_ptr, bias_ptr, codes_ptr, scales_ptr, sums_ptr, count, eps, width,
    x_stride, num_groups, IS_ONE: tl.constexpr, IS_FEW: tl.constexpr, OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if not IS_ONE:
        if row >= tl.load(counts_ptr + count):
            return
    row = as_offset(row, WIDE)
    start = x_ptr + row * x_stride
    step = tl.arange(0, BLOCK)
    # Each program of a row finds the same, sooner than one that waits for another would.
    whole = tl.load(start + step, mask=step < width, other=0.0)
    mean, inverse = _moments(whole, step < width, width, eps)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = columns_of(group)
    inside = column < width
    x = (tl.load(start + column, mask=inside, other=0.0) - mean) * inverse
    x = x * tl.load(weight_ptr + column, mask=inside, other=0.0)
    x = x + tl.load(bias_ptr + column, mask=inside, other=0.0)
    store_codes(
        tl.where(inside, x, 0.0),
        row,
        group,
        group >= 0,
        width,
        codes_ptr,
        scales_ptr,
        sums_ptr,
        num_groups,
        IS_FEW,
        GROUPS,
    )


def add(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append layer_norm for every row of the bucket."""
    x, out, width = facts["x"], facts["out"], facts["width"]
    plan.add_gpu(
        layer_norm_kernel,
        *(x, facts["counts"], facts["weight"], facts["bias"], out, facts["count"], facts["eps"]),
        *(width, x.strides[0], out.strides[0]),
        grid=(x.shape[0],),
        contract=contract,
        facts=facts,
        # As where codes are made of it at once: the compiler might round otherwise.
        enable_fp_fusion=False,
        BLOCK=triton.next_power_of_2(width),
    )


def add_codes(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any]) -> None:
    """Append layer_norm_codes for every row of the bucket."""
    x, width, scales = facts["x"], facts["width"], facts["scales"]
    programs, options = codes_form(x.shape[0], width)
    plan.add_gpu(
        layer_norm_codes_kernel,
        *(x, facts["counts"], facts["weight"], facts["bias"], facts["codes"], scales),
        *(facts["sums"], facts["count"], facts["eps"], width, x.strides[0], scales.shape[1]),
        grid=(x.shape[0], programs),
        contract=contract,
        facts=facts,
        BLOCK=triton.next_power_of_2(width),
        **options,
    )
