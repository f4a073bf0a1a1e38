"""Shows on stderr what takes longer than a moment: on a terminal a bar, else lines in between."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from hypocenter.cli import interrupt
from hypocenter.cli.output import say

PATIENCE_SECONDS = 0.7
#: Between two lines of one stage, where there is no terminal.
LINE_SECONDS = 3.0


class ProgressDisplay:
    """Called with (what is being done, share done from 0 to 1); shows a stage that takes long.

    The first word of what is being done names the stage; `remarks` holds what is said of a stage
    when it is first shown. `say` takes a line where there is no terminal. `clear()` takes the
    display away; a later call starts anew. Safe to call from any thread. `quiet` shows nothing. A
    call raises a Ctrl-C that was held back.
    """

    def __init__(self, *, quiet: bool = False, say: Callable[[str], None] = say) -> None:
        self.remarks: dict[str, str] = {}
        self._quiet, self._say = quiet, say
        self._lock = threading.RLock()
        self._started = 0.0  # when the stage began
        self._last_line: float | None = None  # when a line of the stage was last shown
        self._timer: threading.Timer | None = None
        self._what = ""
        self._fraction = 0.0
        self._bar: _Bar | None = None

    def __call__(self, what: str, fraction: float) -> None:
        interrupt.raise_held()
        if self._quiet:
            return
        with self._lock:
            is_new_stage = what.split()[:1] != self._what.split()[:1]
            self._what, self._fraction = what, fraction
            if self._bar is not None:
                self._bar.update(what, fraction)
            elif is_new_stage:
                self._stop_timer()
                self._started, self._last_line = time.monotonic(), None
                self._timer = threading.Timer(PATIENCE_SECONDS, self._appear)
                self._timer.daemon = True
                self._timer.start()
            elif self._last_line is not None:
                self._show_line(time.monotonic())

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def clear(self) -> None:
        """Take the display away."""
        with self._lock:
            self._stop_timer()
            if self._bar is not None:
                self._bar.stop()
            self._bar = None
            self._what = ""

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _appear(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():  # done, or a newer stage
                return
            if sys.stderr.isatty():
                self._bar = _Bar(self._what, self._fraction)
            else:
                self._show_line(time.monotonic())

    def _show_line(self, now: float) -> None:
        if self._last_line is None:
            remark = self.remarks.get(self._what.split()[0], "")
        elif now - self._last_line >= LINE_SECONDS:
            remark = f"{now - self._started:.0f} s so far"
        else:
            return
        self._last_line = now
        tail = f" ({remark})" if remark else ""
        self._say(f"{self._what}{tail} ...")


class _Bar:
    """The moving bar; rich is loaded when the first one is drawn."""

    def __init__(self, stage: str, fraction: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30))
        self._progress = Progress(
            *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
        )
        self._task = self._progress.add_task(stage, total=1.0)
        self.update(stage, fraction)
        self._progress.start()

    def update(self, stage: str, fraction: float) -> None:
        self._progress.update(self._task, description=stage, completed=fraction)

    def stop(self) -> None:
        self._progress.stop()
