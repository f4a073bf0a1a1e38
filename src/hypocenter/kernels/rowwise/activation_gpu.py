"""Triton kernels of `activation`: one program is a stretch of one row."""

from __future__ import annotations

from typing import Any

from hypocenter.base.tensor import Tensor
from hypocenter.device.op import BoundPlan
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
_PLAIN, _GELU_ERF = tl.constexpr(5), tl.constexpr(6)


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
    """Formula: gate = kind(gate) up, in place; kinds are in `activation.py`.
    Shapes: gate and up f32 [num_rows, width]; counts i32 [2].
    Source: Shazeer, arXiv 2002.05202.
    """
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
    elif KIND == _GELU_ERF:
        size = tl.abs(x)  # of Abramowitz and Stegun's 7.1.26, half, for x over the root of 2
        t = 1.0 / (1.0 + 0.23164189 * size)
        series = 0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)
        tail = t * (0.127414796 + t * (-0.142248368 + t * series)) * tl.exp(-0.5 * x * x)
        return tl.where(x < 0, 0.0, x) - size * tail
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
                True,
            )


@triton.jit
def gate_round_kernel(
    gate_ptr, up_ptr, counts_ptr, rounded_ptr, row_scales_ptr, fragments_ptr, width, gate_pitch,
    pitch, KIND: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_FRAGMENTS: tl.constexpr,
    LEADS: tl.constexpr, OVERLAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Formula: rounded = round(kind(gate) up), as the kernels gate and round make it.
    Shapes: gate and up f32 [num_rows, gate_pitch]; counts i32 [2]; rounded f16 (or bf16 bits)
    and fragments f16 [num_rows, pitch]; row_scales f32 [num_rows].
    Source: Shazeer, arXiv 2002.05202.
    """
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
    x_ptr,
    counts_ptr,
    width,
    KIND: tl.constexpr,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: x = kind(x), in place: gelu, gelu_erf, or max(x, 0)**2.
    Shapes: x f32 [num_rows, width]; counts i32 [2].
    Source: Hendrycks and Gimpel, arXiv 1606.08415; So et al., arXiv 2109.08668.
    """
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
    """Formula: rounded = round(kind(x)), as the kernels activate and round make it.
    Shapes: x f32 [num_rows, x_pitch]; counts i32 [2]; rounded f16 (or bf16 bits) and fragments
    f16 [num_rows, pitch]; row_scales f32 [num_rows].
    Source: Hendrycks and Gimpel, arXiv 1606.08415; So et al., arXiv 2109.08668.
    """
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
    x_ptr,
    counts_ptr,
    count,
    factor,
    width,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: x = factor x, in place.
    Shapes: x f32 [num_rows, width]; counts i32 [2].
    """
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
    x_ptr,
    counts_ptr,
    count,
    cap,
    width,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Formula: x = cap tanh(x / cap), in place, with tanh(y) = 2 sigmoid(2 y) - 1.
    Shapes: x f32 [num_rows, width]; counts i32 [2].
    Source: Gemma 2, arXiv 2408.00118, section 2.
    """
    follow(OVERLAPS)
    row = tl.program_id(0)
    if row >= tl.load(counts_ptr + count):
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = x_ptr + as_offset(row, WIDE) * width + column
    x = tl.load(at, mask=inside, other=0.0)
    tl.store(at, cap * (2.0 * _sigmoid(2.0 * x / cap) - 1.0), mask=inside)


def launch_gate(plan: BoundPlan, gate: Tensor) -> None:
    """Append gate: one program for 256 columns of each row of the bucket."""
    _launch_blocks(plan, gate_kernel, gate, enable_fp_fusion=False)


def launch_activate(plan: BoundPlan, x: Tensor) -> None:
    """Append activate: one program for 256 columns of each row of the bucket."""
    _launch_blocks(plan, activate_kernel, x, enable_fp_fusion=False)


def launch_scale(plan: BoundPlan, x: Tensor) -> None:
    """Append scale: one program for 256 columns of each row of the bucket."""
    _launch_blocks(plan, scale_kernel, x)


def launch_softcap(plan: BoundPlan, x: Tensor) -> None:
    """Append softcap: one program for 256 columns of each row of the bucket."""
    _launch_blocks(plan, softcap_kernel, x)


def _launch_blocks(plan: BoundPlan, kernel: Any, x: Tensor, **options: Any) -> None:
    """What is rounded at once elsewhere gives no `enable_fp_fusion`: the compiler might round
    otherwise."""
    num_rows, width = x.shape
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    plan.add_gpu(kernel, grid=grid, width=width, BLOCK=_BLOCK, **options)


def launch_gate_rounded(
    plan: BoundPlan, gate: Tensor, width: int, rounded: Tensor, fragments: Tensor | None
) -> None:
    """Append gate_round: one program for each row of the bucket."""
    _launch_rows(plan, gate_round_kernel, width, rounded, fragments, gate_pitch=gate.shape[1])


def launch_activate_rounded(
    plan: BoundPlan, x: Tensor, width: int, rounded: Tensor, fragments: Tensor | None
) -> None:
    """Append activate_round: one program for each row of the bucket."""
    _launch_rows(plan, activate_round_kernel, width, rounded, fragments, x_pitch=x.shape[1])


def _launch_rows(
    plan: BoundPlan,
    kernel: Any,
    width: int,
    rounded: Tensor,
    fragments: Tensor | None,
    **pitch: int,
) -> None:
    """A program rounds a row of what it computes."""
    block = max(min(triton.next_power_of_2(width), _MAX_ROW), 128)
    plan.add_gpu(
        kernel,
        grid=(rounded.shape[0],),
        # Without fragments the pointer is never used.
        fragments_ptr=fragments or rounded,
        pitch=rounded.shape[1],
        num_warps=16 if block > 4096 and plan.device.startswith("cuda") else 8,
        # A product and a sum rounded once would not be what the op by itself rounds twice.
        enable_fp_fusion=False,
        IS_WHOLE=width <= block,
        LEADS=leads(fragments),
        BLOCK=block,
        **pitch,
    )
