"""`python -m faults` as its reader has it: rows are kept when they are there, bad words are refused
before anything runs, and a reader that goes away is no error."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faults.__main__ import _rows, main
from faults.row import Platform, Role, Row
from hypocenter.base.errors import EXIT_PIPE, EXIT_USAGE


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


class _Unread(io.StringIO):
    """What has no reader, and tells so when it is written out."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_reader_that_goes_away_ends_it_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unread = _Unread()
    monkeypatch.setattr(sys, "stdout", unread)
    with pytest.raises(SystemExit) as ended:
        main(["--list", "empty_residual"])
    assert ended.value.code == EXIT_PIPE
    assert unread.getvalue().startswith("empty_residual ")
    assert capsys.readouterr().err == ""


def test_without_a_reader_no_other_case_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(collection="programs", name="one", platform=Platform.CPU, role=Role.HEALTHY)
    begun: list[float] = []

    def run(*_: object) -> list[Row]:
        time.sleep(0.05)
        begun.append(time.monotonic())
        return [row]

    def tell(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("faults.__main__._tell", tell)
    case: Any = SimpleNamespace(collection="programs", platforms={Platform.CPU}, run=run)
    options = argparse.Namespace(jobs=1, platform=Platform.CPU)
    with pytest.raises(BrokenPipeError):
        _rows([case] * 40, options, False, tmp_path)
    assert len(begun) < 5
