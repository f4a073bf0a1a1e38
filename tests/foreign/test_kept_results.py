"""How much of what a program with `--nan` computes is kept until it is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hypocenter.foreign.nonfinite.chunk import MAX_BYTES, OpChunk
from hypocenter.foreign.nonfinite.ops import Role

GIB = 1 << 30


def chunk_with(device: str, free_bytes: int) -> OpChunk:
    """One that keeps a result of a byte on the device, of whose memory so much is free."""
    torch: Any = SimpleNamespace(
        cuda=SimpleNamespace(mem_get_info=lambda: (free_bytes, 141 * GIB)),
    )
    storage = SimpleNamespace(_cdata=7)
    result = SimpleNamespace(
        nbytes=1, device=SimpleNamespace(type=device), untyped_storage=lambda: storage
    )
    op: Any = SimpleNamespace(
        number=1, results=[result], facts=SimpleNamespace(role=Role.PLAIN, name="mul")
    )
    chunk = OpChunk(torch)
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
