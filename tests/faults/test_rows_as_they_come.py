"""`python -m faults --rows FILE` keeps each row when it is there, and not only at the end."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faults.__main__ import _rows
from faults.row import Platform, Role, Row


def test_a_run_that_breaks_off_has_left_the_rows_before(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"

    def break_off(*_: object) -> list[Row]:
        until = time.monotonic() + 10
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.001)
        raise RuntimeError("out of time")

    row = Row(collection="programs", name="one", platform=Platform.CPU, role=Role.HEALTHY)
    cases: list[Any] = [
        SimpleNamespace(collection="programs", platforms={Platform.CPU}, run=run)
        for run in (lambda *_: [row], break_off)
    ]
    options = argparse.Namespace(jobs=1, platform=Platform.CPU, json=False, rows=file)
    with pytest.raises(RuntimeError, match="out of time"):
        _rows(cases, options, False, tmp_path)
    [line] = file.read_text().splitlines()
    assert json.loads(line)["name"] == "one"
