"""What a process leaves of its driver beside the table: lines, refusals, names; and all of it read.

`driver-facts` is a log of frames as in `ring.py`, `driver_table.py` has the table. What both say is
in `record/driver_run.py`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.record import driver_table
from hypocenter.record.driver_run import (
    MAX_LAUNCHES,
    MAX_MEMORY,
    MAX_TENSORS,
    DriverRefusal,
    DriverRun,
    DriverTensor,
)
from hypocenter.record.driver_table import Table
from hypocenter.record.gap import Gap
from hypocenter.record.ring import FRAME_HEAD, checksum, frames

FACTS = "driver-facts"
MAX_FACTS_BYTES = 4 << 20
_MAX_SITES = 4096


class _Site(msgspec.Struct, frozen=True, tag=True):
    id: int
    text: str


class _Nothing(msgspec.Struct, frozen=True, tag=True):
    why: str


class _Refused(DriverRefusal, frozen=True, tag=True):
    pass


class _Named(DriverTensor, frozen=True, tag=True):
    pass


_Fact = _Site | _Nothing | _Refused | _Named


class DriverLogWriter:
    """Writes both files into a run folder, which must be there. Raises OSError.

    The table is made by `make_table`, for whoever watches the driver.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.RLock()
        self._sites: dict[str, int] = {}
        self._open(folder)

    def make_table(self) -> mmap.mmap:
        """The table, which is made now."""
        self.table = driver_table.make(self._folder)
        return self.table

    def move(self, folder: Path) -> None:
        """Go on in another folder, with a copy of the table so far; lines are told again.

        Whoever writes into the table is told of the new one by its caller.
        """
        with self._lock:
            old, self._folder = self.table, folder
            self.make_table()[:] = old[:]
            os.close(self._file)
            self._open(folder)
            for text, number in self._sites.items():
                self._write(_Site(number, text))

    def _open(self, folder: Path) -> None:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(folder / FACTS, flags, 0o600)
        self._left = MAX_FACTS_BYTES

    def _write(self, fact: _Fact) -> None:
        payload = self._encoder.encode(fact)
        frame = FRAME_HEAD.pack(len(payload), checksum(payload, 0)) + payload
        with self._lock:
            self._left -= len(frame)
            if self._left >= 0:
                os.write(self._file, frame)

    def site(self, text: str) -> int:
        """The number of a line of the program; 0 for "", and for those that are too many."""
        number = self._sites.get(text)
        if number is None:
            with self._lock:
                if not text or len(self._sites) >= _MAX_SITES:
                    return 0
                number = self._sites[text] = len(self._sites) + 1
                self._write(_Site(number, text))
        return number

    def note_refusal(self, refusal: DriverRefusal) -> None:
        """The driver's answer to a launch was no success."""
        self._write(_Refused(**msgspec.structs.asdict(refusal)))

    def note_tensors(self, tensors: Sequence[DriverTensor]) -> None:
        """What variables stood for when the program failed."""
        for tensor in tensors[:MAX_TENSORS]:
            self._write(_Named(**msgspec.structs.asdict(tensor)))

    def note_nothing(self, why: str) -> None:
        """Why no launch is recorded, or none any more."""
        self._write(_Nothing(why))


# -- reading --------------------------------------------------------------------------------------


def read_driver_log(
    folder: Path, name_of: Callable[[str], str]
) -> tuple[DriverRun | None, tuple[Gap, ...]]:
    """What a process left, and what of it is damaged; None where it has written nothing of it.

    `name_of` gives a kernel's name in its source by the compiler's.
    """
    missing: list[Gap] = []
    facts = _read(folder / FACTS, MAX_FACTS_BYTES, missing)
    if facts is None:
        return None, ()
    sites: dict[int, str] = {}
    run = _run_of(facts, sites, missing)
    data = _read(folder / driver_table.NAME, driver_table.NUM_BYTES, missing)
    if data is not None:
        try:
            run = _with_table(run, Table(data, sites), name_of)
        except ValueError as error:
            missing.append(Gap.damage(driver_table.NAME, str(error)))
    return run, tuple(missing)


def _with_table(run: DriverRun, table: Table, name_of: Callable[[str], str]) -> DriverRun:
    launches = sorted(table.launches(), key=lambda launch: launch.seq)
    before = [launch for launch in launches[:-MAX_LAUNCHES] if launch.code]
    memory = sorted(table.memory(), key=lambda one: one.seq)
    return msgspec.structs.replace(
        run,
        kernels=tuple(
            msgspec.structs.replace(kernel, name=name_of(kernel.symbol))
            for kernel in table.kernels()
        ),
        launches=(*before, *launches[-MAX_LAUNCHES:]),
        memory=tuple(memory[-MAX_MEMORY:]),
        num_launches=table.num_launches,
        num_graphs=table.num_graphs,
    )


def _read(path: Path, limit: int, missing: list[Gap]) -> bytes | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(file, "rb") as opened:
            return opened.read(limit)
    except FileNotFoundError:
        return None
    except OSError as error:
        missing.append(Gap.damage(path.name, error.strerror or str(error)))
        return None


def _run_of(data: bytes, sites: dict[int, str], missing: list[Gap]) -> DriverRun:
    refusals: list[DriverRefusal] = []
    tensors: list[DriverTensor] = []
    why = ""
    for payload in frames(memoryview(data), 0, FACTS, missing, ends_with_nothing=False):
        try:
            fact: Any = msgspec.msgpack.decode(payload, type=_Fact)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            missing.append(Gap.damage(FACTS, "a record that this version does not know"))
            continue
        match fact:
            case _Site(number, text):
                sites[number] = text
            case _Refused():
                refusals.append(DriverRefusal(**msgspec.structs.asdict(fact)))
            case _Named():
                tensors.append(DriverTensor(**msgspec.structs.asdict(fact)))
            case _Nothing(reason):
                why = reason
    return DriverRun(
        refusals=tuple(refusals[:MAX_LAUNCHES]), tensors=tuple(tensors[:MAX_TENSORS]), why_not=why
    )
