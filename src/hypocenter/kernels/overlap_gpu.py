"""How a launch that begins while the one before it still ends waits for that end.

A kernel that takes `OVERLAPS: tl.constexpr`, which the launch door sets, begins with `follow`.
"""

from __future__ import annotations

from hypocenter.device.gpu_lang import tl, triton


@triton.jit
def follow(OVERLAPS: tl.constexpr):
    """Wait until the launch before this one has ended and what it wrote is there to be read.

    Each program does so before it reads or ends: the launch after this one begins when all have
    ended, and counts on it that everything before has.
    """
    if OVERLAPS:
        # PTX ISA, "griddepcontrol". That later launches begin even before this one ends, which
        # `launch_dependents` would allow, was slower on an H200: they hold the processors' places.
        tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
