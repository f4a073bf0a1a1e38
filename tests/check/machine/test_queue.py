"""A host that rewrites memory which a kernel uses directly, before it has waited for the kernel.

As in llama.cpp's issues 28056 and 27506 of 2026, on AMD's GPUs. Executed by our emulator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import ROOT

from hypocenter import amd
from hypocenter.replay.findings import FindingKind

OBJECTS = ROOT / "tests" / "fixtures" / "amd"
TOKENS, HEADS, DIM = 4, 2, 64
SHAPE = ((TOKENS, HEADS), (DIM // 2,))


def _arguments() -> dict[str, Any]:
    return {
        "x": np.ones((TOKENS, HEADS, DIM), np.float32),
        "positions": np.arange(TOKENS, dtype=np.int32),
        "num_heads": HEADS,
        "head_dim": DIM,
        "base": 10000.0,
    }


@pytest.mark.parametrize("is_healthy", [False, True])
def test_inputs_of_the_next_step_are_written_while_the_kernel_reads_those_of_this_one(
    is_healthy: bool,
) -> None:
    """Positions are loaded by the scalar unit, and no copy of them is made."""
    given = _arguments()
    positions = given["positions"]
    assert isinstance(positions, np.ndarray)
    queue = amd.Queue(OBJECTS / "rope.gfx942.co")
    for step in range(2):
        if is_healthy:
            queue.wait()
        positions[:] = np.arange(TOKENS) + step * TOKENS
        queue.launch("rope", SHAPE, given)
    queue.wait()
    if is_healthy:
        assert queue.findings == ()
        return
    (found,) = queue.findings
    assert (found.kind, found.kernel) == (FindingKind.REWRITTEN_IN_FLIGHT, "rope")
    assert (found.argument, found.number) == ("positions", 0)
    assert "the host rewrites 4 elements of positions that the kernel reads" in found.detail
    assert "no wait stands between" in found.detail
    assert found.launched_at is not None
    assert Path(found.launched_at.file) == Path(__file__)
    assert 'queue.launch("rope"' in found.launched_at.expression


def test_what_the_kernel_does_not_touch_may_be_written() -> None:
    """Element 8 is of no token of the launch; and of its result a write is told, too."""
    given = _arguments()
    given["positions"] = positions = np.arange(2 * TOKENS, dtype=np.int32)
    with amd.Queue(OBJECTS / "rope.gfx942.co") as queue:
        queue.launch("rope", SHAPE, given)
        positions[TOKENS:] = 7
    assert queue.findings == ()
    x = given["x"]
    assert isinstance(x, np.ndarray)
    with queue:
        queue.launch("rope", SHAPE, given)
        x[2, 1, 3] = 99.0
    (found,) = queue.findings
    assert (found.argument, found.number) == ("x", 2 * HEADS * DIM + DIM + 3)


def test_findings_of_the_launches_are_those_of_the_queue() -> None:
    given = {**_arguments(), "positions": np.arange(TOKENS - 1, dtype=np.int32)}
    with amd.Queue(OBJECTS / "rope.gfx942.co") as queue:
        queue.launch("rope", SHAPE, given)
    (found,) = queue.findings
    assert (found.kind, found.argument) == (FindingKind.OUT_OF_BOUNDS, "positions")
