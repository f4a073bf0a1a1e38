"""The log of a server: lines of text or of JSON, on stderr or in a file that may be opened anew.

What happened is an event with fields, and `tell` notes it through Python's `logging`. A thread
writes: nobody waits for a disk or a pipe. What cannot be written is counted, and ends nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from hypocenter.base.errors import UsageError

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
#: Lines that wait for the disk, or for whoever reads the pipe; what comes then is lost.
MAX_WAITING = 10_000
#: Of a line of a worker, and of what a client sent.
MAX_LINE_CHARS = 4096
_STOP_SECONDS = 2.0
_STDERR = 2

log = logging.getLogger("hypocenter.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What is told (`level` and what is graver), how, and where to; no `file`: to stderr."""

    level: str = "info"
    format: Literal["text", "json"] = "text"
    file: Path | None = None


def tell(level: int, event: str, message: str, **data: Any) -> None:
    """Log an event: `message` is for people, `data` has the same as fields for programs."""
    log.log(level, "%s", message, extra={"event": event, "data": data})


def escape(text: str) -> str:
    """The text on one line: whatever is not printable is spelled out, so nobody forges a line."""
    shown = text if len(text) <= MAX_LINE_CHARS else f"{text[:MAX_LINE_CHARS]}..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


class TextLines(logging.Formatter):
    """`TIME LEVEL message`, on every line; those of a traceback begin with a bar."""

    def format(self, record: logging.LogRecord) -> str:
        head = f"{_time(record)} {record.levelname:<7}"
        lines = [f"{head} {escape(record.getMessage())}"]
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            lines += [f"{head} | {escape(line)}" for line in trace.splitlines()]
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """An object on each line: `time`, `level`, `event`, `message`, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "other"),
            "message": record.getMessage(),
            **getattr(record, "data", {}),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)  # ASCII: no line end and no control character is left


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Sink(logging.Handler):
    """Writes lines to a file descriptor, in a thread of its own.

    `num_lost` counts the lines that could not be written. The first line that can be written again
    is followed by one that says how many they were.
    """

    def __init__(self, settings: LogSettings) -> None:
        """Raises UsageError for a file that cannot be opened."""
        self._path = settings.file
        self._descriptor: int | None = None
        if settings.file is not None:
            self._descriptor = _open(settings.file)
        elif sys.stderr is not None:
            self._descriptor = os.dup(_STDERR)
        super().__init__()
        self.setFormatter(JsonLines() if settings.format == "json" else TextLines())
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._is_closed = self._is_torn = False
        self.num_lost = self._num_untold = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have the record written soon; never waits and never raises."""
        try:
            line = self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:  # arguments that do not fit their text
            self.handleError(record)
            return
        with self._changed:
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(line)
                self._changed.notify()
            else:
                self._count_lost(1)

    def open_anew(self) -> bool:
        """From now on write to the file that has the name now; False where there is no file.

        Raises UsageError, and goes on with the old one.
        """
        if self._path is None or self._descriptor is None:
            return False
        opened = _open(self._path)
        os.dup2(opened, self._descriptor, inheritable=False)
        os.close(opened)
        return True

    def close(self) -> None:
        """Write what waits, as long as that takes no more than a moment."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(_STOP_SECONDS)
        if self._descriptor is not None and not self._thread.is_alive():
            os.close(self._descriptor)
            self._descriptor = None
        super().close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                line = self._waiting.popleft()
            self._put(line)

    def _put(self, line: bytes) -> None:
        if self._descriptor is None:
            self._count_lost(1)
            return
        rest = b"\n" + line if self._is_torn else line
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # a full disk, a closed terminal, a reader that went away
            self._is_torn = self._is_torn or len(rest) < len(line)
            self._count_lost(1)
            return
        self._is_torn = False
        if self._num_untold:
            number, self._num_untold = self._num_untold, 0
            self.emit(_lost_record(number))

    def _count_lost(self, number: int) -> None:
        self.num_lost += number
        self._num_untold += number


def _lost_record(number: int) -> logging.LogRecord:
    message = f"{number} lines of the log could not be written"
    record = logging.LogRecord(log.name, logging.WARNING, "", 0, message, None, None)
    record.__dict__.update(event="log_lines_lost", data={"num_lost": number})
    return record


@contextlib.contextmanager
def logging_to(settings: LogSettings) -> Iterator[Sink]:
    """Within, all that is logged goes there. Raises UsageError for a file that cannot be opened."""
    sink = Sink(settings)
    root, ours = logging.getLogger(), logging.getLogger("hypocenter")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    root.handlers[:] = [sink]
    ours.setLevel(settings.level.upper())
    # What libraries say is no event of ours: of them only what is wrong is told.
    root.setLevel(max(logging.WARNING, ours.level))
    try:
        yield sink
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
        sink.close()


class WorkerWords:
    """Makes events of what a worker writes to its stderr, line by line. `take` is for the thread
    that reads it; `end` tells what has no line end."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._rest = b""

    def take(self, data: bytes) -> None:
        """Tell the whole lines; a line without an end is told in parts."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._tell(line)
        if len(self._rest) > MAX_LINE_CHARS:
            self.end()

    def end(self) -> None:
        """Nothing follows."""
        rest, self._rest = self._rest, b""
        self._tell(rest)

    def _tell(self, line: bytes) -> None:
        if text := line.decode("utf-8", "replace").rstrip():
            message = f"worker {self._number}: {text}"
            tell(logging.WARNING, "worker_said", message, worker=self._number)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    try:
        opened = os.open(path, flags, 0o600)
    except OSError as error:
        raise UsageError(f"--log-file {path}: {error.strerror}; name a file to write to") from error
    os.set_blocking(opened, True)  # a pipe without a reader is refused, not waited for
    return opened


def since(began: float) -> float:
    """Seconds of the monotonic clock, to the millisecond, as events tell them."""
    return round(time.monotonic() - began, 3)
