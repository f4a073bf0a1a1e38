"""Triton kernels for the tests of the simulated GPU: right ones, and ones to lead astray."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, untyped-decorator, name-defined"
# ruff: noqa: ANN001, ANN201, F821, UP037
from hypocenter.device.triton_lang import tl, triton


@triton.jit
def axpy(x_ptr, y_ptr, factor, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    x, y = tl.load(x_ptr + at, mask=live), tl.load(y_ptr + at, mask=live)
    tl.store(y_ptr + at, factor * x + y, mask=live)


@triton.jit
def gather(x_ptr, index_ptr, out_ptr, count, BLOCK: tl.constexpr):
    """out[i] = x[index[i]]; nobody looks at the indices."""
    at = tl.arange(0, BLOCK)
    live = at < count
    index = tl.load(index_ptr + at, mask=live, other=0)
    tl.store(out_ptr + at, tl.load(x_ptr + index, mask=live), mask=live)


@triton.jit
def peek(x_ptr, offset: "i64", out_ptr):
    tl.store(out_ptr, tl.load(x_ptr + offset))


@triton.jit
def poke(x_ptr, offset: "i64", value):
    tl.store(x_ptr + offset, value)


@triton.jit
def double(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) * 2)


@triton.jit
def queue_up(ticket_ptr, out_ptr):
    """out[k] = the k-th program that came."""
    program = tl.program_id(0) + tl.num_programs(0) * (
        tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    )
    tl.store(out_ptr + tl.atomic_add(ticket_ptr, 1), program)


@triton.jit
def histogram(value_ptr, bin_ptr, claim_ptr, count, BLOCK: tl.constexpr):
    """Counts values above 0 in bins; claim[0] becomes the first program that finds -1 there."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + at, mask=at < count, other=0)
    tl.atomic_add(bin_ptr + value, 1, mask=value > 0)
    tl.atomic_cas(claim_ptr, -1, tl.program_id(0))


@triton.jit
def spin(flag_ptr):
    """Waits for a flag that nobody sets."""
    while tl.load(flag_ptr) == 0:
        pass


@triton.jit
def picky(x_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK >= 16, "BLOCK is below 16")
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)
