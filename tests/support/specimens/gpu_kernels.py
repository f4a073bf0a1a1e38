"""Small Triton kernels that the tests of real hardware launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton


@triton.jit
def scale_kernel(x_ptr, out_ptr, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(out_ptr + at, x * factor, mask=at < count)


@triton.jit
def wild_kernel(x_ptr, distance):
    """Writes `distance` elements from where it may."""
    tl.store(x_ptr + distance, 1.0)
