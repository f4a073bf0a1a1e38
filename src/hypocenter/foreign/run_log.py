"""Where the recording of a program goes: its folder, numbered events, and what is kept of values.

Knows no tensor and no kernel; those are in `seen_memory.py` and `recorder.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypocenter.record import ring
from hypocenter.record.contents import LaunchOutcome, Snapshot
from hypocenter.record.events import OUTSIDE_PLANS, AnyEvent, Now, Values
from hypocenter.record.ring_writer import RingWriter
from hypocenter.record.run_folder import claim_folder, process_record
from hypocenter.record.trace_log import TraceWriter

#: What is written of one program; past it the recording begins anew, and the oldest is gone.
STATIC_BYTES = 16 << 20
RECENT_BYTES = 4 << 20


class RunLog:
    """The files of one process; `num_launches` counts what it launched, those told of no more too.

    `is_full`: what was to be kept had no room. `begin_anew` makes some.
    """

    def __init__(self, base: Path, static_bytes: int = STATIC_BYTES) -> None:
        self._base, self._static_bytes = base, static_bytes
        self._seq = itertools.count(1)
        #: That of an event that is made now.
        self.next_number = self._seq.__next__
        self.num_launches = 0
        self._open()

    def _open(self) -> None:
        self.writer = RingWriter(claim_folder(self._base), static_bytes=self._static_bytes)
        self.folder = self.writer.folder
        self._trace: TraceWriter | None = None
        self.is_full = False
        self.static(process_record())

    def begin_anew(self) -> None:
        """What matters is what was done last; the folder of before goes."""
        old = self.writer
        self._open()
        self.writer.header[ring.CELL_NUM_LOST] = self.num_launches
        old.release()
        with contextlib.suppress(OSError):
            shutil.rmtree(old.folder)

    def now(self) -> Now:
        """Of an event that is made now."""
        return {"seq": self.next_number(), "step": self.num_launches}

    def event(self, event: AnyEvent) -> None:
        """Write an event that newer ones may displace."""
        if not self.writer.event(event):
            self.writer.header[ring.CELL_NUM_LOST] += 1

    def keep_event(self, event: AnyEvent) -> None:
        """Write an event that stays."""
        if not self.writer.static(event):
            self.is_full = True
            self.event(event)

    def static(self, record: Any) -> bool:
        """Write a record that stays; False when there was no room."""
        is_written = self.writer.static(record)
        if not is_written:
            self.is_full = True
            self.writer.header[ring.CELL_NUM_LOST] += 1
        return is_written

    def hold_recent(self, seq: int, values: Sequence[Values]) -> None:
        """Write what tensors of the launch `seq` held; newer ones may displace it."""
        self._writer_of_values().recent(self._snapshot(self.num_launches, seq, values))

    def hold(self, step: int, seq: int, values: Sequence[Values]) -> None:
        """Write what tensors of the launch `seq`, made in `step`, held; it stays."""
        self._writer_of_values().first(self._snapshot(step, seq, values))

    def keep_outcome(self, outcome: LaunchOutcome) -> None:
        """Write all that a launch was given and gave; it stays."""
        self._writer_of_values().outcome(outcome)

    def _snapshot(self, step: int, seq: int, values: Sequence[Values]) -> Snapshot:
        return Snapshot(step, OUTSIDE_PLANS, seq, tuple(values))

    def _writer_of_values(self) -> TraceWriter:
        if self._trace is None:
            self._trace = TraceWriter(self.folder, RECENT_BYTES)
        return self._trace
