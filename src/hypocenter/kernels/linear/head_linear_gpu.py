"""Triton kernel of `head_linear`: a program is 64 outputs of a head for 16 tokens.

A sum has one chain on the matrix units, from the first inputs to the last. Beside weights of f16 an
input is two f16 parts, which a power of two for each head of a token keeps in range.
"""

from __future__ import annotations

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device.op import BoundPlan
from hypocenter.device.triton_lang import tl, triton
from hypocenter.kernels.shared_gpu import as_offset, follow

_TOKENS, _OUTPUTS, _INPUTS = 16, 64, 32


@triton.jit
def _unit(largest):
    """Powers of two that bring magnitudes to 2**13 .. 2**14, and 1 / them."""
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 20), 254)
    unit = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    return unit, ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _keep(x, out, live, num_kept, KEPT: tl.constexpr):
    column = tl.arange(0, KEPT)
    mask = live[:, None] & (column < num_kept)[None, :]
    values = tl.load(x[:, None] + column[None, :], mask=mask, other=0.0)
    tl.store(out[:, None] + column[None, :], values, mask=mask)


@triton.jit
def head_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    counts_ptr,
    num_inputs,
    num_outputs,
    num_kept,
    pitch,
    x_stride,
    out_stride,
    IS_HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
    WIDE: tl.constexpr,
    KEPT: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Formula: out[t, h] = x[t, h, num_inputs:] followed by weight[h].T x[t, h, :num_inputs].
    Shapes: x f32 [num_tokens, >= num_heads * (num_inputs + num_kept)]; weight f16 or f32
    [num_heads, num_inputs, pitch]; out f32 [num_tokens, >= num_heads * (num_kept +
    num_outputs)]; counts i32 [2].
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
    """
    follow(OVERLAPS)
    first, head = tl.program_id(0) * TOKENS, tl.program_id(2)
    num_tokens = tl.load(counts_ptr)
    if first >= num_tokens:
        return
    token = first + tl.arange(0, TOKENS)
    live = token < num_tokens
    row = as_offset(tl.minimum(token, num_tokens - 1), WIDE)
    x = x_ptr + row * x_stride + head * (num_inputs + num_kept)
    out = out_ptr + row * out_stride + head * (num_kept + num_outputs)
    step = tl.arange(0, INPUTS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight = weight_ptr + as_offset(head, WIDE) * num_inputs * pitch + output[None, :]
    largest = tl.zeros([TOKENS], tl.float32)
    if IS_HALF:
        for start in range(0, num_inputs, INPUTS):
            mask = live[:, None] & (start + step < num_inputs)[None, :]
            values = tl.load(x[:, None] + (start + step)[None, :], mask=mask, other=0.0)
            largest = tl.maximum(largest, tl.max(tl.abs(values), axis=1))
    unit, back = _unit(largest)
    total = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inside = start + step < num_inputs
        mask = live[:, None] & inside[None, :]
        values = tl.load(x[:, None] + (start + step)[None, :], mask=mask, other=0.0)
        w = tl.load(weight + (start + step)[:, None] * pitch, mask=inside[:, None], other=0.0)
        if IS_HALF:
            values = values * unit[:, None]
            high = values.to(tl.float16)
            total = tl.dot(high, w, total)
            total = tl.dot((values - high.to(tl.float32)).to(tl.float16), w, total)
        else:
            total = tl.dot(values, w, total, input_precision="ieee")
    if IS_HALF:
        total = total * back[:, None]
    to = (out + num_kept)[:, None] + output[None, :]
    tl.store(to, total, mask=live[:, None] & (output < num_outputs)[None, :])
    if KEPT > 0:
        if tl.program_id(1) == 0:
            _keep(x + num_inputs, out, live, num_kept, KEPT)


def launch(plan: BoundPlan, x: Tensor, weight: Tensor, num_outputs: int, num_kept: int) -> None:
    """Append head_linear for every head of every token of the bucket."""
    num_heads, num_inputs, pitch = weight.shape
    same = {} if plan.device.startswith("cuda") else {"matrix_instr_nonkdim": 16}
    plan.add_gpu(
        head_linear_kernel,
        grid=(triton.cdiv(x.shape[0], _TOKENS), triton.cdiv(num_outputs, _OUTPUTS), num_heads),
        num_inputs=num_inputs,
        pitch=pitch,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
        IS_HALF=weight.dtype is DType.F16,
        KEPT=triton.next_power_of_2(num_kept) if num_kept else 0,
        TOKENS=_TOKENS,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        **same,
    )
