"""The display appears for what takes long, and only for that."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hypocenter.cli import progress as cli_progress
from hypocenter.cli.progress import ProgressDisplay


class ClockTimer(threading.Thread):
    """A timer that a clock of ours fires, in a thread of its own as `threading.Timer` does."""

    def __init__(self, clock: Clock, seconds: float, call: Callable[[], None]) -> None:
        super().__init__(target=call)
        self._clock, self.due = clock, clock.now + seconds

    def start(self) -> None:
        self._clock.timers.append(self)

    def cancel(self) -> None:
        if self in self._clock.timers:
            self._clock.timers.remove(self)

    def fire(self) -> None:
        super().start()
        self.join()


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[ClockTimer] = []

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.due <= self.now]:
            self.timers.remove(timer)
            timer.fire()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    timer = functools.partial(ClockTimer, made)
    fake = SimpleNamespace(
        RLock=threading.RLock, current_thread=threading.current_thread, Timer=timer
    )
    monkeypatch.setattr(cli_progress, "threading", fake)
    monkeypatch.setattr(cli_progress, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_what_is_quick_is_not_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as progress:
        for stage in ("loading weights", "compiling kernel a", "reading the prompt"):
            progress(stage, 0.0)
    clock.pass_by(1.0)
    assert capsys.readouterr().err == ""


def test_each_stage_that_takes_long_is_one_line(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay() as progress:
        progress("compiling kernel a", 0.0)
        clock.pass_by(1.0)
        progress("compiling kernel b", 0.5)
        clock.pass_by(1.0)
        progress("loading weights", 0.0)
        progress("reading the prompt", 0.0)
        clock.pass_by(1.0)
    shown = capsys.readouterr().err
    assert shown == "hypo: compiling kernel a ...\nhypo: reading the prompt ...\n"


def test_a_long_stage_is_heard_of_again(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as progress:
        progress.remarks["compiling"] = "first run only"
        progress("compiling kernel a", 0.0)
        clock.pass_by(1.0)
        clock.pass_by(1.0)
        progress("compiling kernel b", 0.3)  # too early for another line
        clock.pass_by(2.0)
        progress("compiling kernel c", 0.6)
    assert capsys.readouterr().err == (
        "hypo: compiling kernel a (first run only) ...\nhypo: compiling kernel c (4 s so far) ...\n"
    )


def test_quiet_shows_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(quiet=True) as progress:
        progress("compiling kernel a", 0.0)
        clock.pass_by(1.0)
    assert capsys.readouterr().err == ""


def test_a_bar_moves_on_a_terminal_and_goes_away(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
        clock.pass_by(1.0)
        progress("compiling kernel b", 0.5)
    assert updates == [("compiling kernel a", 0.0), ("compiling kernel b", 0.5), ("stopped", 1.0)]
    assert capsys.readouterr().err == ""
