"""Shows on stderr what takes longer than a moment: on a terminal a bar, else a line for a stage."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

PATIENCE_SECONDS = 0.7


class ProgressDisplay:
    """Called with (what is being done, share done from 0 to 1); shows a stage that takes long.

    The first word of what is being done names the stage. `done()` takes the display away; a later
    call starts anew. Safe to call from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._what = ""
        self._fraction = 0.0
        self._bar: _Bar | None = None

    def __call__(self, what: str, fraction: float) -> None:
        with self._lock:
            is_new_stage = what.split()[:1] != self._what.split()[:1]
            self._what, self._fraction = what, fraction
            if self._bar is not None:
                self._bar.update(what, fraction)
            elif is_new_stage:
                self._stop_timer()
                self._timer = threading.Timer(PATIENCE_SECONDS, self._appear)
                self._timer.daemon = True
                self._timer.start()

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.done()

    def done(self) -> None:
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
                print(f"hypo: {self._what} ...", file=sys.stderr, flush=True)


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
