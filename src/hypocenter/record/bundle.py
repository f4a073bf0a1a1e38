"""A crash bundle: everything that a run left behind, as JSON and safetensors in one folder.

No pickle, no code that runs on loading, no weights; text of prompts only with consent.
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypocenter.base.cards import MAX_CARDS, Card
from hypocenter.base.errors import BadBundle, ErrorKind
from hypocenter.record.bundle_arrays import (
    MAX_ARRAYS,
    ArrayFiller,
    arrays_as_bytes,
    read_arrays,
)
from hypocenter.record.bundle_json import (
    DAMAGE,
    NONFINITE,
    as_json,
    encode,
    fields_of,
    hide,
    reason,
    split,
    with_nonfinite,
)
from hypocenter.record.contents import MAX_OUTCOMES, LaunchOutcome, Snapshot
from hypocenter.record.driver_run import DriverRun
from hypocenter.record.events import (
    FOREIGN,
    AnyEvent,
    Declaration,
    LaunchRecord,
    PlanRecord,
    Reached,
    SourceRecord,
    Statistics,
    Stepped,
    TensorRecord,
    is_lasting,
)
from hypocenter.record.fault_record import FaultRecord
from hypocenter.record.gap import Gap
from hypocenter.record.gpu_stop import MAX_REPORTS, MAX_STOPS, GpuStop, SanitizerReport
from hypocenter.record.logged_launch import LoggedLaunch
from hypocenter.record.module_texts import ModuleText
from hypocenter.record.nonfinite import NumbersWatched
from hypocenter.record.order_events import Disordered, OrderWatched
from hypocenter.record.run_records import CheckRecord, ModelRecord

VERSION = 3

KINDS = ("crash", "error", "hang", "suspect")
JSON, ARRAYS, STDERR, SOURCES = "bundle.json", "arrays.safetensors", "stderr.txt", "sources"
MODULES = "modules.json"

# What is written at most, and read at most.
MAX_JSON_BYTES = 64 << 20
MAX_ARRAYS_BYTES = 256 << 20
MAX_STDERR_BYTES = 1 << 20
MAX_SOURCE_BYTES, MAX_SOURCES_BYTES, MAX_SOURCES = 1 << 20, 32 << 20, 2000
MAX_MODULES, MAX_MODULES_BYTES = 2000, 16 << 20
#: Processes of other ranks, each in a folder of its own.
MAX_OTHERS, RANK = 15, "rank"
MAX_LOG_LINES, MAX_LINE_CHARS = 200, 1000
MAX_RECORDS = 1 << 18
#: Launches of all recorded steps together: what looks at each of them stays within seconds.
MAX_LAUNCHES = 1 << 20
MAX_SNAPSHOTS = 4096
MAX_OUTCOME_BYTES = 48 << 20
#: msgspec makes its description of a type where that is first read, which two threads may not do.
_TURN = threading.Lock()


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """What a run left behind. `kind`: crash, error, hang, suspect.

    `packages` to `model` are as the run's own process told them; "" or None where it did not, as
    in bundles from before these fields. `limits` are the fields of `device/limits.py:GpuLimits` of
    the device, None for a CPU; `sees_reads` is as in a DeviceRecord; `cards` are the GPUs of the
    machine; `contracts` the declarations of the kernels' contracts; `modules` the engine's own
    Python; `others` what the processes of the other ranks recorded; `gpu_stops` where GPUs stood
    that left a dump. `fault_before` is how the same command ended when it was run as it is, before
    a run that was not; `reports` what a sanitizer saw in this one. `driver_run` is what the process
    asked of its GPU's driver, None where nobody watched that; `logged_launch` the one that the
    runtime's log ends in. `pid` is the process that the events are of. `outcomes` is what launches
    gave that were made again. `missing` what could not be recovered; `redacted` whether token ids
    inside the vocabulary were replaced by 0.
    """

    version: int = VERSION
    kind: str
    command: tuple[str, ...] = ()
    pid: int | None = None
    started: str = ""
    ended: str = ""
    device: str = ""
    environment: dict[str, str] = {}
    packages: dict[str, str] = {}
    python: str = ""
    platform: str = ""
    driver: str | None = None
    cards: tuple[Card, ...] = ()
    model: ModelRecord | None = None
    limits: dict[str, int | str | tuple[int, int, int]] | None = None
    sees_reads: bool = False
    fault: FaultRecord
    progress: Reached = Reached(None)
    tensors: tuple[TensorRecord, ...] = ()
    plans: tuple[PlanRecord, ...] = ()
    sources: tuple[SourceRecord, ...] = ()
    contracts: dict[str, Declaration] = {}
    modules: tuple[ModuleText, ...] = ()
    others: tuple[Bundle, ...] = ()
    events: tuple[AnyEvent, ...] = ()
    checks: tuple[CheckRecord, ...] = ()
    statistics: tuple[Statistics, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    outcomes: tuple[LaunchOutcome, ...] = ()
    gpu_stops: tuple[GpuStop, ...] = ()
    fault_before: FaultRecord | None = None
    reports: tuple[SanitizerReport, ...] = ()
    driver_run: DriverRun | None = None
    logged_launch: LoggedLaunch | None = None
    stderr: str = ""
    kernel_log: tuple[str, ...] = ()
    missing: tuple[Gap, ...] = ()
    redacted: bool = True

    @property
    def is_foreign(self) -> bool:
        """Whether a program was recorded that is not this package's, and of it launches alone."""
        if not self.tensors and not self.plans:
            told = Disordered | OrderWatched | NumbersWatched
            is_of_numbers = self.fault.error_kind is ErrorKind.NOT_A_NUMBER
            is_told = any(isinstance(event, told) for event in self.events)
            return is_told or is_of_numbers or self.driver_run is not None
        return bool(self.tensors) and all(tensor.owner == FOREIGN for tensor in self.tensors)

    def declaration(self, launch: LaunchRecord) -> Declaration | None:
        """What the contract of a launch says."""
        return self.contracts.get(launch.contract or launch.kernel)


def save(bundle: Bundle, folder: str | Path) -> Bundle:
    """Write the bundle as a new folder that only its owner can read; returns what it holds now.

    What exceeds the limits above is left out, oldest steps first, and `missing` says so. The
    folder appears whole or not at all. Raises BadBundle when it is there already, and OSError
    with the name of the file that could not be written.
    """
    folder = Path(folder)
    if folder.exists() or folder.is_symlink():
        raise BadBundle(folder, "is there already;", "name another folder")
    others = tuple(_fit(_bound(other), folder) for other in bundle.others[:MAX_OTHERS])
    bundle = msgspec.structs.replace(_fit(_bound(bundle), folder), others=others)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(bundle, partial, folder)
        for number, other in enumerate(others, 1):
            (partial / f"{RANK}{number}").mkdir(mode=0o700)
            _write(other, partial / f"{RANK}{number}", folder / f"{RANK}{number}")
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return bundle


def load(folder: str | Path) -> Bundle:
    """Read a bundle of anyone's making; what is damaged in part is left out and told in `missing`.

    Raises BadBundle for a folder that holds none, another version, or one that makes no sense.
    """
    with _TURN:
        return _load_all(folder)


def _load_all(folder: str | Path) -> Bundle:
    """As `load`, with what other ranks recorded."""
    bundle = _load(Path(folder))
    others: list[Bundle] = []
    for number in range(1, MAX_OTHERS + 1):
        own = Path(folder) / f"{RANK}{number}"
        if own.is_symlink() or not own.is_dir():
            break
        try:
            others.append(_load(own))
        except BadBundle as error:
            gap = Gap.damage(f"what rank {number} recorded", str(error))
            return msgspec.structs.replace(bundle, missing=(*bundle.missing, gap))
    return msgspec.structs.replace(bundle, others=tuple(others))


def _load(folder: Path) -> Bundle:
    """As `load`, of one process."""
    if not folder.is_dir():
        raise BadBundle(folder, "is no folder;", "a bundle is one that holds " + JSON)
    data = _read(folder, JSON, MAX_JSON_BYTES)
    if data is None:
        raise BadBundle(folder, JSON, "is not there, so this is no bundle")
    missing: list[Gap] = []
    bundle = _decode(folder, data, missing)
    texts = _read_sources(folder, bundle, missing)
    sources = tuple(
        msgspec.structs.replace(source, text=texts[number])
        for number, source in enumerate(bundle.sources)
    )
    stderr = _part(folder, STDERR, MAX_STDERR_BYTES + 1024, missing)
    bundle = msgspec.structs.replace(
        bundle, sources=sources, stderr=(stderr or b"").decode(errors="replace")
    )
    bundle = _with_modules(folder, _with_arrays(folder, bundle, missing), missing)
    bundle = msgspec.structs.replace(bundle, events=_newest_launches(bundle, missing))
    return msgspec.structs.replace(bundle, missing=bundle.missing + tuple(missing))


# -- writing --------------------------------------------------------------------------------------


def _bound(bundle: Bundle) -> Bundle:
    """The same with texts no longer than their limits; a long stderr keeps its ends."""
    missing = list(bundle.missing)
    stderr = bundle.stderr.encode(errors="replace")
    if len(stderr) > MAX_STDERR_BYTES:
        head = MAX_STDERR_BYTES // 16
        left_out = len(stderr) - MAX_STDERR_BYTES
        mark = f"\n[... {left_out} bytes left out ...]\n".encode()
        stderr = stderr[:head] + mark + stderr[head - MAX_STDERR_BYTES :]
        missing.append(Gap.left_out(f"{left_out} bytes out of the middle of stderr"))
    sources, room = [], MAX_SOURCES_BYTES
    for source in bundle.sources[:MAX_SOURCES]:
        num_bytes = len(source.text.encode(errors="replace"))
        if num_bytes > min(MAX_SOURCE_BYTES, room):
            missing.append(
                Gap.left_out(f"the source of {source.function}", f"it has {num_bytes} bytes")
            )
            source = msgspec.structs.replace(source, text="")
        else:
            room -= num_bytes
        sources.append(source)
    if left_out := len(bundle.sources) - MAX_SOURCES:
        missing += [Gap.left_out(f"{left_out} sources")] * (left_out > 0)
    modules = bundle.modules
    if sum(len(module.text) for module in modules) > MAX_MODULES_BYTES // 2:
        missing.append(Gap.left_out("the texts of the engine's modules", "they are too long"))
        modules = tuple(msgspec.structs.replace(module, text="") for module in modules)
    return msgspec.structs.replace(
        bundle,
        sources=tuple(sources),
        modules=modules[:MAX_MODULES],
        missing=tuple(missing),
        stderr=stderr.decode(errors="replace"),
        kernel_log=tuple(line[:MAX_LINE_CHARS] for line in bundle.kernel_log[-MAX_LOG_LINES:]),
    )


def _fit(bundle: Bundle, folder: Path) -> Bundle:
    """The same without what exceeds the room for JSON and arrays."""
    missing = list(bundle.missing)
    bundle = msgspec.structs.replace(bundle, events=_newest_launches(bundle, missing))
    events = _newest(bundle.events, missing)
    statistics = bundle.statistics
    room = MAX_JSON_BYTES // 4
    sizes = list(itertools.accumulate(len(encode(s)) + 2 for s in reversed(statistics)))
    if sizes and sizes[-1] > room:
        kept = bisect.bisect_right(sizes, room)
        missing.append(
            Gap.left_out(f"the oldest {len(statistics) - kept} of {len(statistics)} statistics")
        )
        statistics = statistics[len(statistics) - kept :]
    room = MAX_ARRAYS_BYTES // 2
    outcomes = bundle.outcomes[:MAX_OUTCOMES]
    while outcomes and sum(outcome.num_bytes for outcome in outcomes) > MAX_OUTCOME_BYTES:
        outcomes = outcomes[:-1]
    room -= sum(outcome.num_bytes for outcome in outcomes)
    if left_out := len(bundle.outcomes) - len(outcomes):
        missing.append(Gap.left_out(f"the last {left_out} of {len(bundle.outcomes)} outcomes"))
    snapshots: list[Snapshot] = []
    for snapshot in bundle.snapshots[:MAX_SNAPSHOTS]:
        room -= sum(len(values.data) for values in snapshot.values)
        if room < 0:
            break
        snapshots.append(snapshot)
    if left_out := len(bundle.snapshots) - len(snapshots):
        missing.append(Gap.left_out(f"the last {left_out} of {len(bundle.snapshots)} snapshots"))
    bundle = msgspec.structs.replace(
        bundle,
        events=events,
        statistics=statistics,
        snapshots=tuple(snapshots),
        outcomes=outcomes,
        missing=tuple(missing),
    )
    num_bytes = len(as_json(msgspec.structs.replace(bundle, stderr="", others=())))
    if num_bytes > MAX_JSON_BYTES:
        raise BadBundle(folder, JSON, f"would have {num_bytes} bytes, above {MAX_JSON_BYTES}")
    return bundle


def _newest(events: tuple[AnyEvent, ...], missing: list[Gap]) -> tuple[AnyEvent, ...]:
    """The history of memory, and as many of the newest steps as fit half of the room."""
    json_room, array_room = MAX_JSON_BYTES // 2, MAX_ARRAYS_BYTES // 2
    num_arrays_left, num_events_left = MAX_ARRAYS // 2, MAX_RECORDS
    oldest = min((event.step for event in events), default=0)
    for event in sorted(events, key=_weight):
        json_room -= len(encode(hide(event, "", {}))) + 2
        num_events_left -= 1
        if isinstance(event, Stepped):
            array_room -= sum(len(values.data) for values in event.inputs)
            num_arrays_left -= len(event.inputs)
        if min(json_room, array_room, num_arrays_left, num_events_left) < 0:
            if is_lasting(event):
                missing.append(
                    Gap.left_out("events", "the history of memory alone exceeds the room for them")
                )
                return ()
            missing.append(
                Gap.left_out(
                    f"events of steps {oldest} to {event.step}", "there was no room for them"
                )
            )
            return _since(events, event.step)
    return events


def _newest_launches(bundle: Bundle, missing: list[Gap]) -> tuple[AnyEvent, ...]:
    """The history of memory, and the newest steps that together made no more than MAX_LAUNCHES."""
    num_launches = {plan.id: len(plan.launches) for plan in bundle.plans}
    steps = [event for event in bundle.events if isinstance(event, Stepped)]
    room = MAX_LAUNCHES
    for event in sorted(steps, key=_weight):
        room -= num_launches.get(event.plan, 0)
        if room < 0:
            missing.append(
                Gap.left_out(
                    f"events of steps up to {event.step}",
                    f"those since made {MAX_LAUNCHES - room - num_launches[event.plan]} launches,"
                    f" and no more than {MAX_LAUNCHES} are looked at",
                )
            )
            return _since(bundle.events, event.step)
    return bundle.events


def _since(events: tuple[AnyEvent, ...], step: int) -> tuple[AnyEvent, ...]:
    """The history of memory, and what came after `step`."""
    return tuple(e for e in events if is_lasting(e) or e.step > step)


def _weight(event: AnyEvent) -> tuple[bool, int]:
    return (not is_lasting(event), -event.step)


def _files(bundle: Bundle) -> Iterator[tuple[str, bytes]]:
    yield JSON, as_json(msgspec.structs.replace(bundle, stderr="", others=()))
    records = itertools.chain(bundle.events, bundle.snapshots, bundle.outcomes)
    yield ARRAYS, arrays_as_bytes(records)
    yield STDERR, bundle.stderr.encode(errors="replace")
    if bundle.modules:
        yield MODULES, encode({module.file: module.text for module in bundle.modules})
    for name, source in zip(_source_files(bundle.sources), bundle.sources, strict=True):
        yield f"{SOURCES}/{name}", source.text.encode(errors="replace")


def _source_files(sources: tuple[SourceRecord, ...]) -> list[str]:
    """A file's name for each, of harmless characters only, whatever the record says."""
    names = []
    seen: collections.Counter[str] = collections.Counter()
    for source in sources:
        stem = re.sub(r"[^A-Za-z0-9_]", "_", f"{source.function[:60]}_{source.id[:16]}")
        seen[stem.lower()] += 1
        again = f"_{seen[stem.lower()]}" if seen[stem.lower()] > 1 else ""
        names.append(f"{stem}{again}.py")
    return names


def _private(inside: int, path: str, flags: int) -> int:
    return os.open(path, flags, 0o600, dir_fd=inside)


def _write(bundle: Bundle, partial: Path, folder: Path) -> None:
    """The files, by the descriptor of `partial`: whoever may write beside it may put another folder
    or a link in its place. Errors name them as in `folder`."""
    inside = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(inside).st_uid != os.getuid():
            raise PermissionError(1, "another user has put a folder in the place of", str(folder))
        os.mkdir(SOURCES, mode=0o700, dir_fd=inside)
        for name, data in _files(bundle):
            try:
                with open(name, "xb", opener=functools.partial(_private, inside)) as file:
                    file.write(data)
            except OSError as error:  # of a full disk nobody says which file there was no room for
                raise OSError(error.errno, error.strerror, str(folder / name)) from error
    finally:
        os.close(inside)


# -- reading --------------------------------------------------------------------------------------


def _read(folder: Path, name: str, limit: int) -> bytes | None:
    """The whole of a regular file; None when there is none. Follows no link."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(folder / name, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadBundle(folder, name, f"cannot be read: {error.strerror}") from error
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadBundle(folder, name, "is no regular file")
        if status.st_size > limit:
            raise BadBundle(folder, name, f"has {status.st_size} bytes, above {limit}")
        return file.read(limit)


def _part(folder: Path, name: str, limit: int, missing: list[Gap]) -> bytes | None:
    """As `_read`, but what cannot be read is told in `missing`."""
    try:
        data = _read(folder, name, limit)
    except BadBundle as error:
        missing.append(Gap.damage(error.part, f"it {error.reason}"))
        return None
    if data is None:
        missing.append(Gap.damage(name, "it is not there"))
    return data


def _read_sources(folder: Path, bundle: Bundle, missing: list[Gap]) -> list[str]:
    if bundle.sources and (folder / SOURCES).is_symlink():
        missing.append(Gap.damage(SOURCES, "it is a link, which was not followed"))
        return [""] * len(bundle.sources)
    texts, room = [], MAX_SOURCES_BYTES
    for name in _source_files(bundle.sources):
        limit = min(MAX_SOURCE_BYTES, room)
        data = _part(folder, f"{SOURCES}/{name}", limit, missing) or b""
        room -= len(data)
        texts.append(data.decode(errors="replace"))
    return texts


def _with_modules(folder: Path, bundle: Bundle, missing: list[Gap]) -> Bundle:
    """With the texts of the engine's modules."""
    data = _part(folder, MODULES, MAX_MODULES_BYTES, missing) if bundle.modules else None
    if data is None:
        return bundle
    try:
        texts = msgspec.json.decode(data, type=dict[str, str])
    except DAMAGE as error:
        missing.append(Gap.damage(MODULES, f"damaged ({reason(error)})"))
        return bundle
    modules = tuple(
        msgspec.structs.replace(module, text=texts.get(module.file, ""))
        for module in bundle.modules
    )
    return msgspec.structs.replace(bundle, modules=modules)


def _decode(folder: Path, data: bytes, missing: list[Gap]) -> Bundle:
    """The records of bundle.json, field by field, so that a damaged one costs only itself."""
    try:
        raw = split(data)
        version = msgspec.json.decode(raw["version"], type=int)
    except KeyError as error:
        raise BadBundle(folder, JSON, "says no version") from error
    except DAMAGE as error:
        raise BadBundle(folder, JSON, f"is damaged: {reason(error)}") from error
    if version != VERSION:
        raise BadBundle(
            folder, JSON, f"has version {version}, but this hypocenter reads version {VERSION}"
        )
    limits = {
        "": MAX_RECORDS,
        "sources": MAX_SOURCES,
        "modules": MAX_MODULES,
        "snapshots": MAX_SNAPSHOTS,
        "outcomes": MAX_OUTCOMES,
        "cards": MAX_CARDS,
        "gpu_stops": MAX_STOPS,
        "reports": MAX_REPORTS,
    }
    fields = fields_of(Bundle, raw, limits, missing)
    try:
        bundle = Bundle(**fields)
    except TypeError as error:
        raise BadBundle(folder, JSON, f"lacks what every bundle has: {error}") from error
    if bundle.kind not in KINDS:
        raise BadBundle(folder, JSON, f"is of kind {bundle.kind!r}, not {', '.join(KINDS)}")
    return with_nonfinite(bundle, raw.get(NONFINITE), missing)


def _with_arrays(folder: Path, bundle: Bundle, missing: list[Gap]) -> Bundle:
    data = _part(folder, ARRAYS, MAX_ARRAYS_BYTES + MAX_JSON_BYTES, missing)
    filler = ArrayFiller(read_arrays(data, ARRAYS, missing) if data is not None else {})
    filled = msgspec.structs.replace(
        bundle,
        events=tuple(map(filler.fill, bundle.events)),
        snapshots=tuple(map(filler.fill, bundle.snapshots)),
        outcomes=tuple(map(filler.fill, bundle.outcomes)),
    )
    if filler.num_lost:
        missing.append(
            Gap.damage(f"{filler.num_lost} arrays", "not there, or not as long as their shape says")
        )
    return filled
