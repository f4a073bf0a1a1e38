"""How much of what a program with `--nan` computes is kept until it is looked at."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hypocenter.foreign.nonfinite.chunk import MAX_BYTES, OpChunk
from hypocenter.foreign.nonfinite.ops import Role

GIB = 1 << 30


def chunk_with(device: str, free_bytes: int) -> OpChunk:
    """One that keeps a result of a byte on the device, of whose memory so much is free."""
    pretended: Any = SimpleNamespace(
        cuda=SimpleNamespace(mem_get_info=lambda: (free_bytes, 141 * GIB)),
    )
    storage = SimpleNamespace(_cdata=7)
    result = SimpleNamespace(
        nbytes=1, device=SimpleNamespace(type=device), untyped_storage=lambda: storage
    )
    op: Any = SimpleNamespace(
        number=1, results=[result], facts=SimpleNamespace(role=Role.PLAIN, name="mul")
    )
    chunk = OpChunk(pretended)
    chunk.add(op)
    return chunk


@pytest.mark.parametrize(
    ("device", "free", "kept"),
    [
        ("cpu", 140 * GIB, MAX_BYTES),
        ("cuda", 140 * GIB, 4 * GIB),
        ("cuda", 32 * GIB, 2 * GIB),
        ("cuda", GIB, GIB),
    ],
)
def test_on_a_gpu_a_part_of_the_free_memory_is_kept(device: str, free: int, kept: int) -> None:
    chunk = chunk_with(device, free)
    assert not chunk.is_full(kept - 1)
    assert chunk.is_full(kept)
    chunk.clear()
    assert not chunk.is_full(kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
def test_of_each_type_the_results_that_are_not_finite_are_found(
    dtype: torch.dtype, bad: float
) -> None:
    largest = torch.full((3,), torch.finfo(dtype).max / 2, dtype=dtype)
    held = [torch.ones(2, 3, dtype=dtype), torch.empty(0, dtype=dtype), largest, -largest]
    found = OpChunk(torch)._largest([*held, torch.tensor([1, bad, 2], dtype=dtype)])
    assert torch.isfinite(found).tolist() == [True, True, True, True, False]
