"""The display appears for what takes long, and only for that."""

from __future__ import annotations

import time

import pytest

from hypocenter.cli import progress as cli_progress
from hypocenter.cli.progress import ProgressDisplay


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_progress, "PATIENCE_SECONDS", 0.05)


def test_what_is_quick_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as progress:
        for stage in ("loading weights", "compiling kernel a", "reading the prompt"):
            progress(stage, 0.0)
    time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_each_stage_that_takes_long_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as progress:
        progress("compiling kernel a", 0.0)
        time.sleep(0.15)
        progress("compiling kernel b", 0.5)
        time.sleep(0.15)
        progress("loading weights", 0.0)
        progress("reading the prompt", 0.0)
        time.sleep(0.15)
    shown = capsys.readouterr().err
    assert shown == "hypo: compiling kernel a ...\nhypo: reading the prompt ...\n"


def test_a_long_stage_is_heard_of_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_progress, "LINE_SECONDS", 0.2)
    with ProgressDisplay() as progress:
        progress.remarks["compiling"] = "first run only"
        progress("compiling kernel a", 0.0)
        time.sleep(0.15)
        progress("compiling kernel b", 0.3)  # too early for another line
        time.sleep(0.2)
        progress("compiling kernel c", 0.6)
    assert capsys.readouterr().err == (
        "hypo: compiling kernel a (first run only) ...\nhypo: compiling kernel c (0 s so far) ...\n"
    )


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(quiet=True) as progress:
        progress("compiling kernel a", 0.0)
        time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_a_bar_moves_on_a_terminal_and_goes_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    updates: list[tuple[str, float]] = []

    class Bar:
        def __init__(self, what: str, fraction: float) -> None:
            updates.append((what, fraction))

        def update(self, what: str, fraction: float) -> None:
            updates.append((what, fraction))

        def stop(self) -> None:
            updates.append(("stopped", 1.0))

    monkeypatch.setattr(cli_progress, "_Bar", Bar)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with ProgressDisplay() as progress:
        progress("compiling kernel a", 0.0)
        time.sleep(0.15)
        progress("compiling kernel b", 0.5)
    assert updates == [("compiling kernel a", 0.0), ("compiling kernel b", 0.5), ("stopped", 1.0)]
    assert capsys.readouterr().err == ""
