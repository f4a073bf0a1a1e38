"""Keys and values of tokens, read back on the host out of the pages in which `kv_write` put them.

No kernel: it is for who looks on, and not for a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hypocenter.base.dtypes import Array, Float32s, bf16_to_f32
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, memory


def read_tokens_later(
    pages: Tensor, slots: Array, *, are_keys: bool, value_dim: int
) -> Callable[[], Float32s]:
    """f32 [num_tokens, heads * columns] of pages f16, bf16 or f32, as `kv_write` lays them out; of
    each head's values the first `value_dim` columns. What is returned waits for the copy.
    """
    block_size = pages.shape[3] if are_keys else pages.shape[2]
    blocks, offsets = slots // block_size, slots % block_size

    def take(held: Array, blocks: Array) -> Float32s:
        if are_keys:
            found = held[blocks, :, :, offsets]
        else:
            found = np.ascontiguousarray(held[blocks, :, offsets, :value_dim])
        if pages.dtype is DType.F16:
            found = found.view(np.float16)
        elif pages.dtype is DType.BF16:
            found = bf16_to_f32(found.view(np.uint16))
        as_f32: Float32s = found.reshape(len(slots), -1).astype(np.float32)
        return as_f32

    if pages.device == "cpu":
        found = take(pages.data, blocks)  # now: a later step writes there
        return lambda: found
    each, places = np.unique(blocks, return_inverse=True)
    waits = [copies.to_host_later(memory.rows(pages, at, at + 1)) for at in map(int, each)]
    return lambda: take(np.concatenate([wait() for wait in waits]), places)
