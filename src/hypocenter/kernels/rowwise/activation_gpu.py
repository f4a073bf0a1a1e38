"""Triton kernels of `activation`: one program is a stretch of one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.contract import Contract
from hypocenter.kernels.linear.quantise_gpu import codes_form, columns_of, store_codes
from hypocenter.kernels.shared_gpu import as_offset, follow

_BLOCK = 256


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _gate(x, up, IS_GELU: tl.constexpr):
    u = 1.5957691216057308 * (x + 0.044715 * x * x * x) if IS_GELU else x
    return x * _sigmoid(u) * up


@triton.jit
def gate_kernel(
    gate_ptr,
    up_ptr,
    counts_ptr,
    width,
    IS_GELU: tl.constexpr,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = as_offset(row, WIDE) * width + column
    x = tl.load(gate_ptr + at, mask=inside, other=0.0)
    up = tl.load(up_ptr + at, mask=inside, other=0.0)
    tl.store(gate_ptr + at, _gate(x, up, IS_GELU), mask=inside)


@triton.jit
def gate_codes_kernel(
    gate_ptr, up_ptr, counts_ptr, codes_ptr, scales_ptr, sums_ptr, width, pitch,
    num_groups, IS_GELU: tl.constexpr, IS_ONE: tl.constexpr, IS_FEW: tl.constexpr,
    OVERLAPS: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if not IS_ONE:
        if row >= tl.load(counts_ptr):
            return
    row = as_offset(row, WIDE)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = columns_of(group)
    inside = column < width
    x = tl.load(gate_ptr + row * pitch + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * pitch + column, mask=inside, other=0.0)
    store_codes(
        _gate(x, up, IS_GELU),
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


@triton.jit
def _activate(x, IS_GELU: tl.constexpr):
    if IS_GELU:
        return _gate(x, 1.0, IS_GELU)
    else:
        positive = tl.where(x < 0, 0.0, x)  # NaN stays what it is
        return positive * positive


@triton.jit
def activate_kernel(
    x_ptr, counts_ptr, width, IS_GELU: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x_ptr + as_offset(row, WIDE) * width + column
    tl.store(at, _activate(tl.load(at, mask=inside, other=0.0), IS_GELU), mask=inside)


@triton.jit
def activate_codes_kernel(
    x_ptr, counts_ptr, codes_ptr, scales_ptr, sums_ptr, width, pitch, num_groups,
    IS_GELU: tl.constexpr, IS_ONE: tl.constexpr, IS_FEW: tl.constexpr, OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if not IS_ONE:
        if row >= tl.load(counts_ptr):
            return
    row = as_offset(row, WIDE)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = columns_of(group)
    x = tl.load(x_ptr + row * pitch + column, mask=column < width, other=0.0)
    store_codes(
        _activate(x, IS_GELU),
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


@triton.jit(do_not_specialize=["count"])
def scale_kernel(
    x_ptr, counts_ptr, count, factor, width, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x_ptr + as_offset(row, WIDE) * width + column
    tl.store(at, tl.load(at, mask=inside, other=0.0) * factor, mask=inside)


@triton.jit(do_not_specialize=["count"])
def softcap_kernel(
    x_ptr, counts_ptr, count, cap, width, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x_ptr + as_offset(row, WIDE) * width + column
    x = tl.load(at, mask=inside, other=0.0)
    tl.store(at, cap * (2.0 * _sigmoid(2.0 * x / cap) - 1.0), mask=inside)


def add_gate(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], is_gelu: bool
) -> None:
    """Append gate: one program for 256 columns of each row of the bucket."""
    gate = facts["gate"]
    plan.add_gpu(
        gate_kernel,
        *(gate, facts["up"], facts["counts"], gate.shape[1]),
        grid=(gate.shape[0], triton.cdiv(gate.shape[1], _BLOCK)),
        contract=contract,
        facts=facts,
        # As where codes are made of it at once: the compiler might round otherwise.
        enable_fp_fusion=False,
        IS_GELU=is_gelu,
        BLOCK=_BLOCK,
    )


def add_gate_codes(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], is_gelu: bool
) -> None:
    """Append gate_codes for every row of the bucket."""
    gate, scales = facts["gate"], facts["scales"]
    (num_rows, pitch), width = gate.shape, facts["width"]
    programs, options = codes_form(num_rows, width)
    plan.add_gpu(
        gate_codes_kernel,
        *(gate, facts["up"], facts["counts"], facts["codes"], scales, facts["sums"], width),
        *(pitch, scales.shape[1]),
        grid=(num_rows, programs),
        contract=contract,
        facts=facts,
        IS_GELU=is_gelu,
        **options,
    )


def add_activate(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], is_gelu: bool
) -> None:
    """Append activate: one program for 256 columns of each row of the bucket."""
    x = facts["x"]
    plan.add_gpu(
        activate_kernel,
        *(x, facts["counts"], x.shape[1]),
        grid=(x.shape[0], triton.cdiv(x.shape[1], _BLOCK)),
        contract=contract,
        facts=facts,
        # As where codes are made of it at once: the compiler might round otherwise.
        enable_fp_fusion=False,
        IS_GELU=is_gelu,
        BLOCK=_BLOCK,
    )


def add_activate_codes(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], is_gelu: bool
) -> None:
    """Append activate_codes for every row of the bucket."""
    x, scales = facts["x"], facts["scales"]
    (num_rows, pitch), width = x.shape, facts["width"]
    programs, options = codes_form(num_rows, width)
    plan.add_gpu(
        activate_codes_kernel,
        *(x, facts["counts"], facts["codes"], scales, facts["sums"], width, pitch),
        scales.shape[1],
        grid=(num_rows, programs),
        contract=contract,
        facts=facts,
        IS_GELU=is_gelu,
        **options,
    )


def add_in_place(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], count: int
) -> None:
    """Append scale or softcap, whichever the contract is of."""
    x = facts["x"]
    kernel, number = (
        (scale_kernel, facts["factor"]) if "factor" in facts else (softcap_kernel, facts["cap"])
    )
    plan.add_gpu(
        kernel,
        *(x, facts["counts"], count, number, x.shape[1]),
        grid=(x.shape[0], triton.cdiv(x.shape[1], _BLOCK)),
        contract=contract,
        facts=facts,
        BLOCK=_BLOCK,
    )
