"""What Triton kernels of several ops share: offsets of 64 bits, waiting, and how `linear` ends.

A kernel takes `WIDE: tl.constexpr`, which the launch door sets when an argument spans 2**31
elements or more; the first factor of each large offset goes through `as_offset`. A kernel that
takes `OVERLAPS: tl.constexpr`, which the door sets as well, begins with `follow`.
"""

from __future__ import annotations

from hypocenter.device.triton_lang import tl, triton


@triton.jit
def as_offset(index, WIDE: tl.constexpr):
    if WIDE:
        return index.to(tl.int64)
    else:
        return index


@triton.jit
def lead(OVERLAPS: tl.constexpr):
    """Let the launch after this one begin when all programs of this one have.

    For kernels that take few processors: the next one asks for its weights meanwhile. Of others
    that was slower on an H200: who only waits holds a processor's place.
    """
    if OVERLAPS:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Wait until the launch before this one has ended and what it wrote is there to be read.

    Each program does so before it reads what launches write, or ends: the launch after this one
    counts on it that everything before has ended.
    """
    if OVERLAPS:
        # PTX ISA, "griddepcontrol".
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


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
