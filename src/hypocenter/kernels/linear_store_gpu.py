"""What all kernels of `linear` end with: bias, what was there before, and the store."""

from __future__ import annotations

from hypocenter.device.gpu_lang import tl, triton
from hypocenter.kernels.index_gpu import as_offset


@triton.jit
def store_outputs(
    out_ptr, rows, outputs, out_stride, total, bias_ptr, live, HAS_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store total, which has the shape that rows and outputs broadcast to, where `live`."""
    at = out_ptr + as_offset(rows, WIDE) * out_stride + outputs
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs)
    if ACCUMULATE:
        total += tl.load(at, mask=live, other=0.0)
    tl.store(at, total, mask=live)
