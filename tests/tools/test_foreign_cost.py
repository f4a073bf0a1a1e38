"""What records cost: programs run by turns, alone and below the doctor."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("foreign_cost")


@pytest.mark.tier("tools")
def test_a_training_step_is_timed_alone_and_recorded(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In Triton's interpreter, where the figures say nothing."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(script, "NUM_PAIRS", 1)
    [plain], [recorded] = script.in_pairs("train_speed", tmp_path, "16", "8", "2")
    assert plain > 0
    assert recorded > 0


def test_numbers_of_a_program_are_medians_over_its_runs(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of each number by itself; plain and recorded runs take turns."""
    ran = []

    def run(command: list[str], **_: Any) -> Any:
        ran.append("doctor" in command)
        number = len(ran)
        return type("Done", (), {"stdout": f"{number} {100 * (number % 4)}\n"})

    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.in_pairs("graph_speed", tmp_path, num_pairs=3) == ([3.0, 100.0], [4.0, 200.0])
    assert ran == [False, True] * 3
