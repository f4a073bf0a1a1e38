"""Triton kernels of `activation`: one program is a stretch of one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypocenter.contracts.contract import Contract
from hypocenter.device.plan import PlanBuilder
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.linear.quantise_gpu import (
    leads,
    power_of,
    store_halves,
    store_rounded,
)
from hypocenter.kernels.shared_gpu import as_offset, follow, lead

_BLOCK = 256
#: Columns of a row that a program takes at once.
_MAX_ROW = 16384
#: What `activation.py` calls these kinds.
_GELU, _CLAMPED, _SIGMOID = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
_PLAIN = tl.constexpr(5)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _gate(x, up, KIND: tl.constexpr):
    """KIND(x) * up, by its number; NaN stays what it is."""
    if KIND == _CLAMPED:
        x = tl.where(x > 7.0, 7.0, x)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return x * _sigmoid(1.702 * x) * (up + 1.0)
    elif KIND == _SIGMOID:
        return _sigmoid(x) * up
    elif KIND == _PLAIN:
        return x * up
    else:
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x) if KIND == _GELU else x
        return x * _sigmoid(u) * up


@triton.jit
def gate_kernel(
    gate_ptr,
    up_ptr,
    counts_ptr,
    width,
    KIND: tl.constexpr,
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
    tl.store(gate_ptr + at, _gate(x, up, KIND), mask=inside)


@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == _GELU:
        return _gate(x, 1.0, KIND)
    else:
        positive = tl.where(x < 0, 0.0, x)  # NaN stays what it is
        return positive * positive


@triton.jit
def _value_at(given, ups, column, width, KIND: tl.constexpr, HAS_UP: tl.constexpr):
    """What a gate, or an activation by itself, makes of columns of a row."""
    inside = column < width
    x = tl.load(given + column, mask=inside, other=0.0)
    if HAS_UP:
        return _gate(x, tl.load(ups + column, mask=inside, other=0.0), KIND)
    else:
        return _activate(x, KIND)


@triton.jit
def _round_row(
    given, ups, width, row, rounded_ptr, row_scales_ptr, fragments_ptr, pitch,
    KIND: tl.constexpr, HAS_UP: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_FRAGMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    step = tl.arange(0, BLOCK)
    if IS_WHOLE:
        store_rounded(
            _value_at(given, ups, step, width, KIND, HAS_UP),
            step,
            width,
            row,
            rounded_ptr,
            row_scales_ptr,
            fragments_ptr,
            pitch,
            HAS_FRAGMENTS,
        )
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            values = _value_at(given, ups, start + step, width, KIND, HAS_UP)
            largest = tl.maximum(largest, tl.abs(values))
        up, down = power_of(tl.max(largest, axis=0))
        tl.store(row_scales_ptr + row, down)
        stop = (width + 127) // 128 * 128
        for start in range(0, stop, BLOCK):
            values = _value_at(given, ups, start + step, width, KIND, HAS_UP)
            store_halves(
                (values * up).to(tl.float16),
                start + step,
                stop,
                rounded_ptr + row * pitch,
                fragments_ptr + row * pitch,
                HAS_FRAGMENTS,
            )


@triton.jit
def gate_round_kernel(
    gate_ptr, up_ptr, counts_ptr, rounded_ptr, row_scales_ptr, fragments_ptr, width, gate_pitch,
    pitch, KIND: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_FRAGMENTS: tl.constexpr,
    LEADS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lead(OVERLAPS and LEADS)
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    row = as_offset(row, WIDE)
    _round_row(
        gate_ptr + row * gate_pitch,
        up_ptr + row * gate_pitch,
        width,
        row,
        rounded_ptr,
        row_scales_ptr,
        fragments_ptr,
        pitch,
        KIND,
        True,
        IS_WHOLE,
        HAS_FRAGMENTS,
        BLOCK,
    )


@triton.jit
def activate_kernel(
    x_ptr, counts_ptr, width, KIND: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x_ptr + as_offset(row, WIDE) * width + column
    tl.store(at, _activate(tl.load(at, mask=inside, other=0.0), KIND), mask=inside)


@triton.jit
def activate_round_kernel(
    x_ptr, counts_ptr, rounded_ptr, row_scales_ptr, fragments_ptr, width, x_pitch, pitch,
    KIND: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_FRAGMENTS: tl.constexpr,
    LEADS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lead(OVERLAPS and LEADS)
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr):
        return
    row = as_offset(row, WIDE)
    _round_row(
        x_ptr + row * x_pitch,
        x_ptr,
        width,
        row,
        rounded_ptr,
        row_scales_ptr,
        fragments_ptr,
        pitch,
        KIND,
        False,
        IS_WHOLE,
        HAS_FRAGMENTS,
        BLOCK,
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


def add_gate(plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], kind: int) -> None:
    """Append gate: one program for 256 columns of each row of the bucket."""
    gate = facts["gate"]
    plan.add_gpu(
        gate_kernel,
        *(gate, facts["up"], facts["counts"], gate.shape[1]),
        grid=(gate.shape[0], triton.cdiv(gate.shape[1], _BLOCK)),
        contract=contract,
        facts=facts,
        # As where it is rounded at once: the compiler might round otherwise.
        enable_fp_fusion=False,
        KIND=kind,
        BLOCK=_BLOCK,
    )


def _options_of_rows(plan: PlanBuilder, facts: Mapping[str, Any]) -> dict[str, Any]:
    """How a program rounds a row of what it computes."""
    width = facts["width"]
    block = max(min(triton.next_power_of_2(width), _MAX_ROW), 128)
    return {
        "num_warps": 16 if block > 4096 and plan.device.startswith("cuda") else 8,
        # A product and a sum rounded once would not be what the op by itself rounds twice.
        "enable_fp_fusion": False,
        "IS_WHOLE": width <= block,
        "HAS_FRAGMENTS": facts["fragments"] is not None,
        "LEADS": leads(facts),
        "BLOCK": block,
    }


def add_gate_rounded(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], kind: int
) -> None:
    """Append gate_round: one program for each row of the bucket."""
    gate, rounded, fragments = facts["gate"], facts["rounded"], facts["fragments"]
    (num_rows, pitch), width = gate.shape, facts["width"]
    plan.add_gpu(
        gate_round_kernel,
        # Without fragments the pointer is never used.
        *(gate, facts["up"], facts["counts"], rounded, facts["row_scales"], fragments or rounded),
        *(width, pitch, rounded.shape[1]),
        grid=(num_rows,),
        contract=contract,
        facts=facts,
        KIND=kind,
        **_options_of_rows(plan, facts),
    )


def add_activate(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], kind: int
) -> None:
    """Append activate: one program for 256 columns of each row of the bucket."""
    x = facts["x"]
    plan.add_gpu(
        activate_kernel,
        *(x, facts["counts"], x.shape[1]),
        grid=(x.shape[0], triton.cdiv(x.shape[1], _BLOCK)),
        contract=contract,
        facts=facts,
        # As where it is rounded at once: the compiler might round otherwise.
        enable_fp_fusion=False,
        KIND=kind,
        BLOCK=_BLOCK,
    )


def add_activate_rounded(
    plan: PlanBuilder, contract: Contract, facts: Mapping[str, Any], kind: int
) -> None:
    """Append activate_round: one program for each row of the bucket."""
    x, rounded, fragments = facts["x"], facts["rounded"], facts["fragments"]
    (num_rows, pitch), width = x.shape, facts["width"]
    plan.add_gpu(
        activate_round_kernel,
        # Without fragments the pointer is never used.
        *(x, facts["counts"], rounded, facts["row_scales"], fragments or rounded),
        *(width, pitch, rounded.shape[1]),
        grid=(num_rows,),
        contract=contract,
        facts=facts,
        KIND=kind,
        **_options_of_rows(plan, facts),
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
