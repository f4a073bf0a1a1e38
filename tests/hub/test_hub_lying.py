"""A hub that lies 200 times changes nothing outside of its cache, and each lie ends in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from outside.hub_lies import LyingHub, draw, lying_hub, problem_of

NUM_LIES, PER_TEST = 200, 50


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lies") / "world"


@pytest.fixture(scope="module")
def hub(world: Path) -> Iterator[LyingHub]:
    with lying_hub(world) as hub:
        yield hub


@pytest.mark.parametrize("first", range(0, NUM_LIES, PER_TEST))
def test_a_lie_ends_in_one_line(hub: LyingHub, world: Path, first: int) -> None:
    problems = [problem_of(hub, seed, world) for seed in range(first, first + PER_TEST)]
    assert [problem for problem in problems if problem] == []


def test_lies_are_of_all_kinds(tmp_path: Path) -> None:
    words = {word.split()[0] for seed in range(NUM_LIES) for word in draw(seed, tmp_path).words}
    kinds = {"list", "head", "status", "file", "302", "hard", "lost", "pipe", "folder"}
    assert kinds <= words
