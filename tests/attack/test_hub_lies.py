"""Ten thousand lies of a hub: no file outside, one line each, bounded bytes and time.

One that fails is run alone by its number: `problem_of(hub, NUMBER, folder)`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from outside.hub_lies import LyingHub, lying_hub, problem_of

NUM_LIES, PER_TEST = 10_000, 1000
#: In memory, where there is such a place: removing folders from a disk takes longer than lies do.
_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def world() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hypo-lies-", dir=_MEMORY if _MEMORY.is_dir() else None))
    yield folder / "world"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def hub(world: Path) -> Iterator[LyingHub]:
    with lying_hub(world) as hub:
        yield hub


@pytest.mark.parametrize("first", range(0, NUM_LIES, PER_TEST))
def test_a_lie_ends_in_one_line(hub: LyingHub, world: Path, first: int) -> None:
    problems = [problem_of(hub, seed, world) for seed in range(first, first + PER_TEST)]
    assert [problem for problem in problems if problem] == []
