"""`python -m faults --rows FILE` keeps each row when it is there, and not only at the end."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faults.__main__ import _rows, main
from faults.row import Platform, Role, Row
from hypocenter.base.errors import EXIT_USAGE


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


@pytest.mark.parametrize(("words", "told"), [
    (["--rows", "{}/none/rows.jsonl"], "rows.jsonl: there is no such folder; leave it out"),
    (["--rows", "{}/rows.jsonl", "--again", "--work", "{}"], "rows.jsonl: --again makes no rows"),
    (["--work", "{}", "added_to_nothing"], "has an earlier run of added_to_nothing; name an empty"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused_before_anything_runs(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "victims" / "added_to_nothing").mkdir(parents=True)
    assert main([word.format(tmp_path) for word in words]) == EXIT_USAGE
    assert told in capsys.readouterr().err
