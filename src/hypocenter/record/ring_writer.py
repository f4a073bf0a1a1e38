"""Writes a run folder, which `ring.py` describes; what to write, `record/recorder.py` knows."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.record import ring
from hypocenter.record.events import AnyEvent
from hypocenter.record.ring import (
    CELL_MAGIC,
    CELL_PID,
    CELL_SEGMENT_BYTES,
    CELL_STATE,
    CELL_VERSION,
    ENDED,
    FRAME_HEAD,
    HEADER_BYTES,
    KINDS,
    MAGIC,
    MAX_FRAME_BYTES,
    RUNNING,
    SEGMENT_BYTES,
    STATIC_BYTES,
    VERSION,
    checksum,
)

_PREFIXES = {kind: bytes((number,)) for number, kind in KINDS.items()}
_EVENT = _PREFIXES[AnyEvent]
_NOTHING = bytes(8)


class RingWriter:
    """Writes one run folder, which is made here, readable by its user alone.

    Raises OSError when it cannot be made, and from `static`, when there is no room. Not safe from
    two threads. The lock on `ring` tells others that the process lives.
    """

    def __init__(
        self, folder: Path, segment_bytes: int = SEGMENT_BYTES, static_bytes: int = STATIC_BYTES
    ) -> None:
        self.folder = folder
        self._segment_bytes, self._static_left = segment_bytes, static_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._files: list[int] = []
        #: Frames of the log that are to be written at once; None: each is, as it comes.
        self._held: bytearray | None = None
        folder.mkdir(mode=0o700)
        try:
            self._map = self._make(HEADER_BYTES + 2 * segment_bytes)
        except OSError:
            self.release()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._bytes = memoryview(self._map)
        self.header_page = self._bytes[:HEADER_BYTES]
        self.header = self.header_page.cast("Q")
        self.header[CELL_VERSION] = VERSION
        self.header[CELL_STATE] = RUNNING
        self.header[CELL_PID] = os.getpid()
        self.header[CELL_SEGMENT_BYTES] = segment_bytes
        self.header[CELL_MAGIC] = MAGIC
        self._generation = 0
        self._at = self._end = 0
        self._turn()

    def _make(self, num_bytes: int) -> mmap.mmap:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        self._static_file = self._open("static", flags | os.O_APPEND)
        file = self._open("ring", flags)
        # Room is taken now: a page that cannot be had later would end the process.
        os.posix_fallocate(file, 0, num_bytes)
        # The lock has an opening of its own: the mapping keeps the other one, in children too.
        fcntl.flock(self._open("ring", os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_EX)
        return mmap.mmap(file, num_bytes)

    def _open(self, name: str, flags: int) -> int:
        file = os.open(self.folder / name, flags, 0o600)
        self._files.append(file)
        return file

    def static(self, record: Any) -> bool:
        """Append a record to the log; False when the log is full."""
        payload = _PREFIXES.get(type(record), _EVENT) + self._encoder.encode(record)
        frame = FRAME_HEAD.pack(len(payload), checksum(payload, 0)) + payload
        num_bytes = len(frame)
        if num_bytes > min(self._static_left, FRAME_HEAD.size + MAX_FRAME_BYTES):
            return False
        self._static_left -= num_bytes
        if self._held is not None:
            self._held += frame
        else:
            self._append(frame)
        return True

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Within, records of the log are kept, and written at its end by one call of the system,
        which takes longer than all else that a record takes. Raises OSError as `static` does."""
        outer, self._held = self._held, bytearray()
        try:
            yield
        finally:
            held, self._held = self._held, outer
            if held and self._files:
                self._append(held)

    def _append(self, frames: bytes | bytearray) -> None:
        left = num_bytes = len(frames)
        while left:  # a frame that is cut off here is what a reader calls torn
            left -= os.write(self._static_file, frames[num_bytes - left :])

    def event(self, event: AnyEvent) -> bool:
        """Append an event to the ring; False when it is larger than a segment."""
        payload = self._encoder.encode(event)
        num_bytes = len(payload)
        start = self._at
        stop = start + 8 + num_bytes
        if stop + 8 > self._end:
            if num_bytes + 24 > self._segment_bytes:
                return False
            self._turn()
            start = self._at
            stop = start + 8 + num_bytes
        # Checksum, payload, and that nothing comes next; the length last, which makes it count.
        check = checksum(payload, self._generation).to_bytes(4, "little")
        self._bytes[start + 4 : stop + 8] = check + payload + _NOTHING
        self._bytes[start : start + 4] = num_bytes.to_bytes(4, "little")
        self._at = stop
        return True

    def close(self, state: int = ENDED) -> None:
        """Say how the run ended, and give files and lock up.

        The mapping stays as long as somebody has `header`: a launch of another thread may be about
        to write there.
        """
        self.header[CELL_STATE] = state
        with contextlib.suppress(OSError):
            os.utime(self.folder / "ring")  # what is written through a mapping does not do so
        self.release()

    def release(self) -> None:
        """Give files and lock up without a word, as the child of a fork must."""
        while self._files:
            os.close(self._files.pop())
        self._static_file = -1  # and not whatever is opened next

    def _turn(self) -> None:
        """Go on in the other segment, whose frames are forgotten."""
        self._generation += 1
        start = HEADER_BYTES + self._generation % 2 * self._segment_bytes
        self._bytes[start + 8 : start + 16] = _NOTHING
        self._bytes[start : start + 8] = self._generation.to_bytes(8, "little")
        self._at, self._end = start + 8, start + self._segment_bytes


class MarkRuns:
    """The slots of the devices whose marks write to a recorder's `header`, and the runs of each.

    Safe from several threads.
    """

    def __init__(self, header: memoryview) -> None:
        self._header, self._lock = header, threading.Lock()
        self._slots: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def claim(self, device: str) -> int | None:
        """The number under which a device's marks write; None when there is none left."""
        with self._lock:
            if device not in self._slots and len(self._slots) < ring.NUM_SLOTS:
                self._slots[device] = len(self._slots)
            return self._slots.get(device)

    def count(self, device: str) -> int:
        """How many runs of plans with marks have begun on `device`."""
        return self._counts.get(device, 0)

    def note(self, device: str, tag: int, word: int) -> None:
        """Another run begins, of the plan with this tag and at this place."""
        if device not in self._slots:
            return
        with self._lock:
            number = self._counts[device] = self._counts.get(device, 0) + 1
            slot = self._slots[device]
            at = ring.CELL_RUNS + 2 * (slot * ring.NUM_RUNS + number % ring.NUM_RUNS)
            self._header[at] = 0  # not this one while it is written
            self._header[at + 1] = word
            self._header[at] = number << 16 | tag
