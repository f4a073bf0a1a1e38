"""The table of all rounds, printed at the end and left as JSON in build/attack/figures.json."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
from repository import ROOT

from attack.arena import Arena, Row, arena

FIGURES = ROOT / "build" / "attack" / "figures.json"
_ROWS = pytest.StashKey[list[Row]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[Row], None]:
    """Puts a row into the table, and fails the test when it has a problem."""

    def note(row: Row) -> None:
        rows = request.config.stash[_ROWS]
        rows.append(row)
        _write(rows)
        assert not row.problems, f"{row.attack}: {'; '.join(row.problems)}; {row.seen}"

    return note


@pytest.fixture(scope="session")
def arenas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Arena]]:
    """A server of each kind; a new one behind an attack that left marks on the last."""
    with contextlib.ExitStack() as stack:
        current: list[Arena] = []

        def of(kind: str) -> Arena:
            if current and (current[0].kind != kind or current[0].is_spoiled):
                stack.close()
                current.clear()
            if not current:
                current.append(stack.enter_context(arena(tmp_path_factory.mktemp(kind), kind)))
            return current[0]

        yield of


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = config.stash[_ROWS]
    if not rows:
        return
    terminalreporter.section("attacks")
    for line in table(rows):
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"all figures: {FIGURES.relative_to(ROOT)}")


def _write(rows: list[Row]) -> None:
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    told = [{**asdict(row), "verdict": row.verdict} for row in rows]
    FIGURES.write_text(json.dumps(told, indent=1) + "\n")


def table(rows: list[Row]) -> Iterator[str]:
    """One line for each attack: seconds alone / beside, MiB of the server / of all, verdict."""
    width = max(len(row.attack) for row in rows)
    yield f"{'attack':{width}}  {'/health s':>13}  {'first token s':>13}  {'MiB':>11}  verdict"
    for row in rows:
        health = _pair(row.health_alone, row.health_beside, 2)
        ttft = _pair(row.ttft_alone, row.ttft_beside, 2)
        sizes = [
            None if size is None else size / 2**20 for size in (row.server_bytes, row.tree_bytes)
        ]
        memory = _pair(sizes[0], sizes[1], 0)
        yield f"{row.attack:{width}}  {health:>13}  {ttft:>13}  {memory:>11}  {row.verdict[:90]}"


def _pair(first: float | None, second: float | None, digits: int) -> str:
    return "/".join("-" if one is None else f"{one:.{digits}f}" for one in (first, second))
