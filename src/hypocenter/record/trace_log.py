"""The files of a traced run: figures of tensors after each launch, and contents of suspect ones.

They lie in the folder `trace` of a run folder: `statistics`, `first` and `outcomes` are logs of
frames that only grow, up to a limit; each `recent-N` holds the launches of one step and gives way
to newer ones. Frames are those of `ring.py`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.record.contents import MAX_OUTCOMES, LaunchOutcome, Snapshot
from hypocenter.record.events import Statistics
from hypocenter.record.gap import Gap
from hypocenter.record.ring import FRAME_HEAD, MAX_FRAME_BYTES, checksum, frames

FOLDER, STATISTICS, FIRST, RECENT = "trace", "statistics", "first", "recent-"
OUTCOMES = "outcomes"
#: A larger tensor is neither read nor kept.
MAX_TENSOR_BYTES = 64 << 20
MAX_STATISTICS_BYTES = 32 << 20
MAX_FIRST_BYTES = 64 << 20
MAX_OUTCOME_BYTES = 64 << 20
_MAX_FILES = 1 << 12


class TraceWriter:
    """Writes the folder `trace` of a run folder; raises OSError when it cannot."""

    def __init__(self, run_folder: Path, recent_bytes: int) -> None:
        self._folder = run_folder / FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._encoder = msgspec.msgpack.Encoder()
        self._room = {
            STATISTICS: MAX_STATISTICS_BYTES,
            FIRST: MAX_FIRST_BYTES,
            OUTCOMES: MAX_OUTCOME_BYTES,
        }
        self._recent_bytes = recent_bytes
        self._recent: deque[tuple[str, int]] = deque()  # file and bytes, oldest first

    def statistics(self, record: Statistics) -> None:
        self._append(STATISTICS, record)

    def first(self, snapshot: Snapshot) -> None:
        """The launch after which something was wrong for the first time."""
        self._append(FIRST, snapshot)

    def outcome(self, outcome: LaunchOutcome) -> None:
        """A launch of which all is known that it was given, and that it gave."""
        self._append(OUTCOMES, outcome)

    def recent(self, snapshot: Snapshot) -> None:
        """A launch of a step as any other; whole steps are given up, oldest first."""
        name = f"{RECENT}{snapshot.step}"
        frame = self._frame(snapshot)
        if len(frame) > min(self._recent_bytes, MAX_FRAME_BYTES):
            return
        if self._recent and self._recent[-1][0] == name:
            self._recent[-1] = name, self._recent[-1][1] + len(frame)
        else:
            self._recent.append((name, len(frame)))
        self._write(name, frame)
        while sum(size for _, size in self._recent) > self._recent_bytes:
            (self._folder / self._recent.popleft()[0]).unlink(missing_ok=True)

    def _append(self, name: str, record: Any) -> None:
        frame = self._frame(record)
        self._room[name] -= len(frame)
        if self._room[name] >= 0:
            self._write(name, frame)

    def _frame(self, record: Any) -> bytes:
        payload = self._encoder.encode(record)
        return FRAME_HEAD.pack(len(payload), checksum(payload, 0)) + payload

    def _write(self, name: str, frame: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._folder / name, flags, 0o600)
        with open(file, "ab") as opened:
            opened.write(frame)


class Trace(msgspec.Struct, frozen=True):
    """What could be read of a traced run; `missing` says what could not."""

    statistics: tuple[Statistics, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    outcomes: tuple[LaunchOutcome, ...] = ()
    missing: tuple[Gap, ...] = ()


def read_trace(run_folder: Path) -> Trace:
    """Read what is whole; never raises for what is torn, cut off or garbage.

    A run that was not traced gives an empty Trace. Snapshots come in the order of their launches.
    """
    folder = run_folder / FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return Trace()
    missing: list[Gap] = []
    statistics = tuple(_records(folder / STATISTICS, MAX_STATISTICS_BYTES, Statistics, missing))
    snapshots: dict[tuple[int, int, int], Snapshot] = {}
    for path in sorted(folder.glob(f"{RECENT}*"), key=_step)[:_MAX_FILES]:
        for record in _records(path, MAX_FIRST_BYTES, Snapshot, missing):
            snapshots[record.step, record.plan, record.launch] = record
    for record in _records(folder / FIRST, MAX_FIRST_BYTES, Snapshot, missing):
        snapshots[record.step, record.plan, record.launch] = record
    outcomes = _records(folder / OUTCOMES, MAX_OUTCOME_BYTES, LaunchOutcome, missing)
    return Trace(
        statistics,
        tuple(snapshots[key] for key in sorted(snapshots)),
        tuple(outcomes)[:MAX_OUTCOMES],
        tuple(missing),
    )


def _records(path: Path, limit: int, kind: Any, missing: list[Gap]) -> Iterator[Any]:
    name = f"trace/{path.name}"
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(file, "rb") as opened:
            data = opened.read(limit + 1)
    except FileNotFoundError:
        return
    except OSError as error:
        missing.append(Gap.damage(name, error.strerror or str(error)))
        return
    if len(data) > limit:
        missing.append(Gap.left_out(name, f"what lies beyond its first {limit} bytes"))
        data = data[:limit]
    for payload in frames(memoryview(data), 0, name, missing, ends_with_nothing=False):
        try:
            record = msgspec.msgpack.decode(payload, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            missing.append(Gap.damage(name, "a record that this version does not know"))
            continue
        yield record


def _step(path: Path) -> int:
    number = path.name.removeprefix(RECENT)
    return int(number) if number.isascii() and number.isdigit() and len(number) < 20 else 0
