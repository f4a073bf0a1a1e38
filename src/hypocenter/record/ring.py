"""The files that a running process leaves behind: their format, and a reader of it.

A run folder holds `static`, a log of frames that only grows, and `ring`, a mapped file: a header of
64-bit cells and two segments of frames that take turns, so that whole frames are always there. All
of it is written into memory that outlives the process. `ring_writer.py` writes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.record.events import (
    AnyEvent,
    ContractRecord,
    Declaration,
    IdsLearned,
    Launched,
    Place,
    PlanRecord,
    Reached,
    Repeated,
    SourceRecord,
    Stepped,
    TensorRecord,
)
from hypocenter.record.gap import Gap
from hypocenter.record.known_launch import KnownLaunch, full_launch
from hypocenter.record.module_texts import ModuleDigests
from hypocenter.record.run_records import CheckRecord, DeviceRecord, ModelRecord, ProcessRecord
from hypocenter.settings.config import is_simulated

MAGIC = int.from_bytes(b"hyporing", "little")
VERSION = 3
HEADER_BYTES = 4096
SEGMENT_BYTES = 2 << 20
STATIC_BYTES = 64 << 20
#: Length and checksum before each frame's payload.
FRAME_HEAD = struct.Struct("<II")
#: No frame is larger; a length above it is damage.
MAX_FRAME_BYTES = 32 << 20

# -- the cells of the header, unsigned 64-bit, little-endian --------------------------------------

CELL_MAGIC, CELL_VERSION = 0, 1
#: RUNNING, ENDED or FAILED; what dies keeps saying that it runs.
CELL_STATE = 2
CELL_PID, CELL_SEGMENT_BYTES = 3, 4
#: The launch that is about to be made; see `place_word`.
CELL_PLACE = 5
#: The last launch that a simulated GPU has finished, as a place.
CELL_COMPLETED = 6
#: time.monotonic_ns() at which the running step began; 0 between steps.
CELL_STEP_STARTED = 7
#: Number of the last step.
CELL_STEP = 8
#: How many events and static records could not be written.
CELL_NUM_LOST = 9
#: Bit i: check i of CHECKS is armed. From CELL_CHECK_RUNS on: how often each ran.
CELL_ARMED = 10
CELL_CHECK_RUNS = 12
#: What marks of a real GPU write, one cell for each of NUM_SLOTS devices: 32 bits run, 16 bits tag
#: of the plan, 16 bits launch.
CELL_MARK = 32
#: For each device, of the last NUM_RUNS runs of plans with marks: run and tag, place of the run.
CELL_RUNS = 64
NUM_SLOTS, NUM_RUNS = 4, 32

#: How many launches that are told in short are read, the newest: in full they take much more.
MAX_REPEATED = 8192

#: A run that reported a fault and then ended by itself has FAILED.
RUNNING, ENDED, FAILED = 1, 2, 3

#: Checks that are counted.
CHECKS = ("contracts", "step indices", "index values", "guard", "host copies")

KINDS: dict[int, Any] = {
    1: ProcessRecord,
    2: DeviceRecord,
    3: SourceRecord,
    4: ContractRecord,
    5: TensorRecord,
    6: PlanRecord,
    7: AnyEvent,
    8: ModelRecord,
    9: KnownLaunch,
    10: ModuleDigests,
}
_MAX_PLAN = _MAX_LAUNCH = (1 << 16) - 1
_MAX_STEP = (1 << 32) - 1


def place_word(step: int, plan: int, launch: int = 0) -> int:
    """Step, plan and launch as one number: 32, 16 and 16 bits. What exceeds them stops there."""
    if step > _MAX_STEP or plan > _MAX_PLAN or launch > _MAX_LAUNCH:
        step, plan, launch = min(step, _MAX_STEP), min(plan, _MAX_PLAN), min(launch, _MAX_LAUNCH)
    return step << 32 | plan << 16 | launch


def place_of(word: int) -> Place | None:
    """The place of a word; None for 0, which no place has, for plans count from 1."""
    return Place(word >> 32, word >> 16 & _MAX_PLAN, word & _MAX_LAUNCH) if word else None


def checksum(payload: bytes | memoryview, seed: int) -> int:
    """CRC-32 of a frame: seed (the segment's generation), length and payload."""
    return zlib.crc32(payload, checksum_before(len(payload), seed))


@functools.lru_cache(maxsize=4096)
def checksum_before(num_bytes: int, seed: int) -> int:
    """That of a frame's seed and length, with which the checksum begins."""
    return zlib.crc32(FRAME_HEAD.pack(seed & 0xFFFFFFFF, num_bytes))


#: A file in a run folder that is empty until somebody ends the process on purpose.
BY_HAND = "ended-by-hand"


def was_by_hand(folder: Path) -> bool:
    """Whether SIGTERM or SIGHUP came before the process was gone."""
    try:
        return (folder / BY_HAND).stat().st_size > 0
    except OSError:
        return False


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All that could be read of a run folder. `missing` says what could not.

    `is_clean`: it ended by itself and had reported no fault; `has_left`: it ended by itself.
    `events` are in order; `model` is the one that was loaded last.
    `step_started_ns` is the monotonic time at which the running step began, None between steps.
    """

    folder: Path
    pid: int | None = None
    is_alive: bool = False
    is_clean: bool = False
    has_left: bool = False
    process: ProcessRecord | None = None
    model: ModelRecord | None = None
    modules: ModuleDigests | None = None
    devices: tuple[DeviceRecord, ...] = ()
    progress: Reached = Reached(None)
    step_started_ns: int | None = None
    tensors: tuple[TensorRecord, ...] = ()
    plans: tuple[PlanRecord, ...] = ()
    sources: tuple[SourceRecord, ...] = ()
    contracts: dict[str, Declaration] = {}
    events: tuple[AnyEvent, ...] = ()
    checks: tuple[CheckRecord, ...] = ()
    missing: tuple[Gap, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True):
    """The header of a ring alone: state, pid, last step, when it began, what was submitted."""

    pid: int
    is_clean: bool
    step: int
    step_started_ns: int | None
    submitted: Place | None


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """Quick enough to be asked often; None when there is no whole header."""
    header = _header_of(_read(folder / "ring", HEADER_BYTES, []))
    if header is None:
        return None
    return Heartbeat(
        header[CELL_PID],
        header[CELL_STATE] == ENDED,
        header[CELL_STEP],
        header[CELL_STEP_STARTED] or None,
        place_of(header[CELL_PLACE]),
    )


def is_alive(folder: Path) -> bool:
    """Whether the process that writes this folder still has it locked."""
    try:
        file = os.open(folder / "ring", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def run_folders(base: Path) -> list[Path]:
    """The run folders below `base`, the one that was begun last first."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and (Path(entry) / "ring").is_file():
                    found.append((os.stat(Path(entry) / "static").st_ctime_ns, Path(entry)))
    return [folder for _, folder in sorted(found, reverse=True)]


def read_run(folder: Path) -> Run:
    """Read what is whole; never raises for what is torn, cut off or garbage."""
    missing: list[Gap] = []
    found: dict[Any, list[Any]] = {kind: [] for kind in KINDS.values()}
    for record in _static(
        _read(folder / "static", STATIC_BYTES + MAX_FRAME_BYTES, missing), missing
    ):
        found[type(record) if type(record) in found else AnyEvent].append(record)
    data = _read(folder / "ring", HEADER_BYTES + 2 * MAX_FRAME_BYTES, missing)
    header = _header_of(data)
    if header is None:
        missing.append(Gap.damage("ring", "no whole header, so its events and places are unknown"))
        header = memoryview(bytes(HEADER_BYTES)).cast("Q")
    else:
        found[AnyEvent] += _ring_events(data, header[CELL_SEGMENT_BYTES], missing)
    if num_lost := header[CELL_NUM_LOST]:
        missing.append(Gap.left_out(f"{num_lost} records", "too large, or the log was full"))
    told = _in_full(found[AnyEvent], found[KnownLaunch], missing)
    events = _with_learned_ids(sorted(told, key=lambda event: event.seq))
    plans = found[PlanRecord]
    return Run(
        folder=folder,
        pid=header[CELL_PID] or None,
        is_alive=is_alive(folder),
        is_clean=header[CELL_STATE] == ENDED,
        has_left=header[CELL_STATE] in (ENDED, FAILED),
        process=found[ProcessRecord][0] if found[ProcessRecord] else None,
        model=found[ModelRecord][-1] if found[ModelRecord] else None,
        modules=found[ModuleDigests][0] if found[ModuleDigests] else None,
        devices=tuple(found[DeviceRecord]),
        progress=_progress(header, plans, found[DeviceRecord]),
        step_started_ns=header[CELL_STEP_STARTED] or None,
        tensors=tuple(found[TensorRecord]),
        plans=tuple(plans),
        sources=tuple(found[SourceRecord]),
        contracts={contract.key: contract.declaration for contract in found[ContractRecord]},
        events=tuple(events),
        checks=tuple(
            CheckRecord(name, bool(header[CELL_ARMED] >> i & 1), header[CELL_CHECK_RUNS + i])
            for i, name in enumerate(CHECKS)
        ),
        missing=tuple(missing),
    )


def _read(path: Path, max_bytes: int, missing: list[Gap]) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(file, "rb") as opened:
            return opened.read(max_bytes)
    except OSError as error:
        missing.append(Gap.damage(path.name, error.strerror or str(error)))
        return b""


def _header_of(data: bytes) -> memoryview | None:
    """The header, when there is a whole one of a version that is known."""
    if len(data) < HEADER_BYTES:
        return None
    header = memoryview(data)[:HEADER_BYTES].cast("Q")
    return header if header[CELL_MAGIC] == MAGIC and header[CELL_VERSION] == VERSION else None


def _static(data: bytes, missing: list[Gap]) -> Iterator[Any]:
    for payload in frames(memoryview(data), 0, "static", missing, ends_with_nothing=False):
        kind = KINDS.get(payload[0])
        record = None
        if kind is not None:
            record = _decode(payload[1:], kind)
        if record is None:
            missing.append(Gap.damage("static", "a record that this version does not know"))
        else:
            yield record


def _in_full(
    events: list[AnyEvent], known: list[KnownLaunch], missing: list[Gap]
) -> list[AnyEvent]:
    """Launches that were told in short as if they had been told in full: the newest of them.

    With older ones those go that were told in full themselves, so that none is missing between two.
    """
    by_number = {launch.id: launch for launch in known}
    seen = [event.seq for event in events if isinstance(event, Repeated)]
    first = sorted(seen)[-MAX_REPEATED] if len(seen) > MAX_REPEATED else 0
    events = [event for event in events if event.seq >= first or not _may_go(event)]
    told: list[AnyEvent] = []
    num_lost = 0
    for event in events:
        full = full_launch(event, by_number) if isinstance(event, Repeated) else event
        if full is None:
            num_lost += 1
        else:
            told.append(full)
    if num_lost:
        missing.append(Gap.damage("ring", f"it is not known what {num_lost} launches were"))
    return told


def _may_go(event: AnyEvent) -> bool:
    """A launch; one in a graph is kept for the replays that may follow."""
    return isinstance(event, Repeated) or (isinstance(event, Launched) and not event.graph)


def _with_learned_ids(events: list[AnyEvent]) -> list[AnyEvent]:
    """What was learned late of a step's inputs in its place, as if it had been known."""
    learned = {event.of: event for event in events if isinstance(event, IdsLearned)}
    return [
        _complete(event, learned[event.seq])
        if isinstance(event, Stepped) and event.seq in learned
        else event
        for event in events
        if not isinstance(event, IdsLearned)
    ]


def _complete(event: Stepped, learned: IdsLearned) -> Stepped:
    requests = [
        msgspec.structs.replace(request, digest=digest)
        for request, digest in zip(event.requests, learned.digests, strict=False)
    ]
    return msgspec.structs.replace(
        event, inputs=learned.inputs + event.inputs, requests=tuple(requests)
    )


def _ring_events(data: bytes, segment_bytes: int, missing: list[Gap]) -> list[AnyEvent]:
    events = []
    if not 64 <= segment_bytes <= MAX_FRAME_BYTES:
        missing.append(
            Gap.damage("ring", f"segments of {segment_bytes} bytes, so its events are unknown")
        )
        return []
    for number in (0, 1):
        name = f"ring, segment {number}"
        start = HEADER_BYTES + number * segment_bytes
        segment = memoryview(data)[start : start + segment_bytes]
        if len(segment) < segment_bytes:
            missing.append(Gap.damage(name, f"{segment_bytes - len(segment)} bytes are cut off"))
        generation = int.from_bytes(segment[:8], "little")
        for payload in frames(segment[8:], generation, name, missing, ends_with_nothing=True):
            event = _decode(payload, AnyEvent)
            if event is None:
                missing.append(Gap.damage(name, "an event that this version does not know"))
            else:
                events.append(event)
    return events


def frames(
    data: memoryview, seed: int, name: str, missing: list[Gap], *, ends_with_nothing: bool
) -> Iterator[memoryview]:
    """Whole frames. One that is damaged is passed over where another follows it."""
    at, num_damaged = 0, 0
    while at + FRAME_HEAD.size <= len(data):
        length, check = FRAME_HEAD.unpack_from(data, at)
        if length == 0 and ends_with_nothing:
            break
        stop = at + FRAME_HEAD.size + length
        payload = data[at + FRAME_HEAD.size : stop]
        is_whole = 0 < length <= MAX_FRAME_BYTES and stop <= len(data)
        if is_whole and checksum(payload, seed) == check:
            yield payload
        elif is_whole and _frame_at(data, stop, seed):
            num_damaged += 1
        else:
            missing.append(Gap.damage(name, f"torn or damaged from byte {at} on"))
            break
        at = stop
    else:
        if at < len(data):
            missing.append(Gap.damage(name, f"torn from byte {at} on"))
    if num_damaged:
        missing.append(Gap.damage(name, f"{num_damaged} damaged records were passed over"))


def _frame_at(data: memoryview, at: int, seed: int) -> bool:
    """Whether a whole frame stands there."""
    if at + FRAME_HEAD.size > len(data):
        return False
    length, check = FRAME_HEAD.unpack_from(data, at)
    payload = data[at + FRAME_HEAD.size : at + FRAME_HEAD.size + length]
    return bool(0 < length == len(payload) and checksum(payload, seed) == check)


def _decode(payload: memoryview, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _progress(header: memoryview, plans: list[PlanRecord], devices: list[DeviceRecord]) -> Reached:
    """What was submitted, and what is known to have ended on the device of that."""
    submitted = place_of(header[CELL_PLACE])
    plan = next((plan for plan in plans if submitted and plan.id == submitted.plan), None)
    if submitted is None or plan is None:
        return Reached(submitted)
    if plan.device == "cpu":  # each launch ends before the next one begins
        before = submitted.launch - 1
        return Reached(submitted, Place(submitted.step, plan.id, before) if before >= 0 else None)
    if is_simulated(plan.device):
        return Reached(submitted, place_of(header[CELL_COMPLETED]))
    # A device is told of when it is opened, and again when it has its slot.
    slots = [
        device.slot for device in devices if device.name == plan.device and device.slot is not None
    ]
    slot = slots[-1] if slots else -1
    if not 0 <= slot < NUM_SLOTS:
        return Reached(submitted)
    return Reached(submitted, _place_of_mark(header, slot))


def _place_of_mark(header: memoryview, slot: int) -> Place | None:
    """The place of a device's last mark: its run is looked up in the table of runs."""
    mark = header[CELL_MARK + slot]
    at = CELL_RUNS + 2 * (slot * NUM_RUNS + (mark >> 32) % NUM_RUNS)
    run = place_of(header[at + 1])
    if not mark or run is None or header[at] != mark >> 16:
        return None
    return Place(run.step, run.plan, mark & _MAX_LAUNCH)
