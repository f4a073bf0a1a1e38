"""The one rule for the width of offsets in GPU kernels.

A kernel takes `WIDE: tl.constexpr`, which the launch door sets when an argument spans 2**31
elements or more; the first factor of each large offset goes through `as_offset`.
"""

from __future__ import annotations

from hypocenter.device.gpu_lang import tl, triton


@triton.jit
def as_offset(index, WIDE: tl.constexpr):
    if WIDE:
        return index.to(tl.int64)
    else:
        return index
