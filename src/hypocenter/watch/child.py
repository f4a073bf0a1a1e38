"""Runs a command as a child, passes its output on as it comes, and ends it when a step hangs.

Knows processes only; what the child left behind is read by `collect.py`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from hypocenter.base.cards import Card, CardWatch
from hypocenter.record import ring
from hypocenter.record.gap import Gap
from hypocenter.record.gpu_stop import GpuStop
from hypocenter.watch import job
from hypocenter.watch.gpu_dumps import DUMP_SECONDS, GpuDumps, gpu_dumps
from hypocenter.watch.memory_killer import num_memory_kills

#: Kept of a child's stderr: its beginning, and twice this much of its end at least.
_HEAD_BYTES, _TAIL_BYTES = 64 << 10, 512 << 10
_TICK_SECONDS = 0.2
#: After so long without a word a debug agent has told all.
_QUIET_SECONDS = 2.0
#: How long a child may take to write its stacks and end.
_ABORT_SECONDS = 10.0
#: With a deadline a command has this long at least until its first step or launch: it loads what
#: it needs.
START_SECONDS = 60.0
#: What the C library and Python say of a process whose memory is damaged, or that is about to die.
_DAMAGE = re.compile(
    rb"^(?:malloc|free|realloc|munmap_chunk|malloc_consolidate)\(\): |^corrupted (?:size|double)"
    rb"|^double free or corruption|^Fatal Python error: (?:Segmentation|Aborted|Bus)",
    re.M,
)
#: One that said so and then does nothing at all for so long will never end by itself.
DAMAGED_SECONDS = 30.0
#: How long output is awaited of whoever else holds the child's stderr.
_DRAIN_SECONDS = 0.5
#: How long a command that is asked to end may take for it.
_LEAVE_SECONDS = 2.0


class Enough(NamedTuple):
    """When a command need not go on: `is_there` is asked at each look, and `what` is there then."""

    is_there: Callable[[], bool]
    what: str


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a step may take; the first one of a process also compiles.

    Of a program without steps a launch counts as one, and so does a wait for the GPU. Between
    them, no step or launch may begin for `idle`, and before the first one for `start`: threads that
    wait for each other record nothing. With `enough` the command is ended once that is there.
    """

    first_step: float = 600.0
    step: float = 120.0
    start: float = math.inf
    idle: float = math.inf
    enough: Enough | None = None


@dataclass(frozen=True, slots=True)
class Follower:
    """Who has the command do work for others: a server, of its worker. Both are called in the
    thread that watches.

    `on_start` is told the process group's number. `on_late` is told of a step that is past its
    deadline, and for how long it ran, before anything is asked of the process.
    """

    on_start: Callable[[int], object]
    on_late: Callable[[float], object] = lambda seconds: None


class Shrunk(NamedTuple):
    """A file that the command names and that became shorter while it ran."""

    path: Path
    before_bytes: int
    now_bytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. `hung_seconds`: how long its last step had been running, if it was ended;
    `is_idle`: no step was under way, and for so long none had begun; without `has_begun` none ever
    had, for which a command has START_SECONDS at least. `is_damaged`: it had said that its memory
    is damaged, and then did nothing for so long. `enough`: what was there, for which it was ended.

    `num_memory_kills`: how many processes of the control group the kernel has killed for lack of
    memory meanwhile, None where it does not say. `is_interrupted`: Ctrl-C was typed, and handed
    on. Times are of the wall clock; `since` is the monotonic time of the start.
    `shrunk`: files that the command names and that lost their end meanwhile. `gpu_stops` is where
    GPUs stood that left a dump, and `gpu_gaps` what of that is not known. `cards` are the GPUs at
    the end.
    """

    command: tuple[str, ...]
    pid: int
    exit_code: int | None
    signal: int | None
    stderr: str
    started: float
    ended: float
    since: float
    hung_seconds: float | None = None
    is_idle: bool = False
    has_begun: bool = True
    is_damaged: bool = False
    is_interrupted: bool = False
    enough: str = ""
    num_memory_kills: int | None = None
    shrunk: tuple[Shrunk, ...] = ()
    gpu_stops: tuple[GpuStop, ...] = ()
    gpu_gaps: tuple[Gap, ...] = ()
    cards: tuple[Card, ...] = ()


def watch(
    command: Sequence[str],
    environment: Mapping[str, str],
    runs: Path,
    pass_on: Callable[[bytes], object],
    deadlines: Deadlines | None = None,
    stdout: int | None = None,
    follower: Follower | None = None,
) -> Ended:
    """Run `command` to its end; its stdin and stdout are ours, its stderr goes to `pass_on`.

    `stdout` is the file descriptor that its stdout goes to instead. With a `follower` the command
    gets neither our terminal nor our stdin.
    `runs` is where its recorders write, which tells when a step is past its deadline; the whole
    process group is ended then, and when this process ends. Where there is a GPU that can leave a
    core dump, it does so at a fault, and before a command that hangs is ended. Raises UsageError
    when there is no such command.
    """
    files, deadlines = _named_files(command), deadlines or Deadlines()
    begun, since, kills = time.time(), time.monotonic(), num_memory_kills()
    with gpu_dumps(environment, command) as dumps:
        armed = {**environment, **dumps.variables}
        apart = follower is not None
        # GPUs are asked once the command has begun, while it loads what it needs.
        with (
            job.start_job(command, armed, stdout, apart=apart) as running,
            CardWatch() as card_watch,
        ):
            child = _Child(running, pass_on, dumps, follower)
            if follower is not None:
                follower.on_start(running.process.pid)
            with _handing_on(child):
                hung = child.wait(runs, deadlines)
            cards = card_watch.end()
        stops, gaps = dumps.stops(child.stderr())
    code, kills_now = running.process.returncode, num_memory_kills()
    return Ended(
        command=tuple(command),
        pid=running.process.pid,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stderr=child.stderr(),
        started=begun,
        ended=time.time(),
        since=since,
        hung_seconds=hung,
        is_idle=child.is_idle,
        has_begun=child.has_begun,
        is_damaged=child.is_damaged,
        is_interrupted=child.num_interrupts > 0,
        enough=deadlines.enough.what if deadlines.enough and child.has_enough else "",
        num_memory_kills=None if kills is None or kills_now is None else kills_now - kills,
        shrunk=_shrunk_since(files),
        gpu_stops=stops,
        gpu_gaps=gaps,
        cards=cards,
    )


def environment_for(runs: Path) -> dict[str, str]:
    """That of a command of ours: it records into `runs`, and writes its stacks when aborted."""
    environment = {**os.environ, "HYPO_RUN_DIR": str(runs), "PYTHONFAULTHANDLER": "1"}
    environment.pop("HYPO_RECORD", None)
    return environment


def _named_files(command: Sequence[str]) -> dict[Path, os.stat_result]:
    """The files that a command names, as a word or behind the `=` of an option."""
    files: dict[Path, os.stat_result] = {}
    for path in {Path(text) for word in command for text in (word, word.partition("=")[2]) if text}:
        with contextlib.suppress(OSError, ValueError):  # no file, or nothing that is a path
            if stat.S_ISREG((status := path.stat()).st_mode):
                files[path] = status
    return files


def _shrunk_since(files: Mapping[Path, os.stat_result]) -> tuple[Shrunk, ...]:
    """Those that are shorter now; one that another was moved over keeps its bytes for who has it
    open, and does not count."""
    shrunk = []
    for path, before in files.items():
        with contextlib.suppress(OSError):
            now = path.stat()
            if os.path.samestat(now, before) and now.st_size < before.st_size:
                shrunk.append(Shrunk(path, before.st_size, now.st_size))
    return tuple(shrunk)


@dataclass(slots=True)
class _Child:
    job: job.TerminalJob
    pass_on: Callable[[bytes], object]
    dumps: GpuDumps
    follower: Follower | None = None
    #: Whether it was ended because what was wanted of it was there.
    has_enough: bool = False
    num_interrupts: int = 0
    #: Whether it was ended although no step of it was under way.
    is_idle: bool = False
    has_begun: bool = True
    #: Whether it was ended because it hung by damage of its own.
    is_damaged: bool = False
    #: Since when nothing was done that costs time, once it had said so; and that time by then.
    _quiet_since: float = 0.0
    _ticks: int = -1
    _said_damage: bool = False
    #: When it went on last, after it had been stopped from the terminal.
    _resumed: float = 0.0
    _head: bytearray = field(default_factory=bytearray)
    _tail: bytearray = field(default_factory=bytearray)
    _num_lost: int = 0
    _is_closed: bool = False

    def wait(self, runs: Path, deadlines: Deadlines) -> float | None:
        """Until the end; returns the seconds of the step that was past its deadline, if one was.

        Or those in which nothing was begun.
        """
        next_look = time.monotonic() + _TICK_SECONDS
        last_seen, seen_at = _beats(runs), time.monotonic()
        while self.job.process.poll() is None:
            self._read(_TICK_SECONDS)
            if self.job.follow():
                self._resumed = time.monotonic()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _TICK_SECONDS
                if deadlines.enough is not None and deadlines.enough.is_there():
                    self.has_enough = True
                    self._leave()
                    return None
                beats = _beats(runs)
                if late := _late_step(beats, deadlines, self._resumed):
                    pid, seconds = late
                    if self.follower is not None:
                        self.follower.on_late(seconds)
                    self._abort(pid)
                    return seconds
                if (seconds := self._seconds_damaged()) > DAMAGED_SECONDS:
                    self.is_damaged = True
                    self._abort(None)
                    return seconds
                if beats != last_seen or _is_within_step(beats):
                    last_seen, seen_at = beats, time.monotonic()
                idle = time.monotonic() - max(seen_at, self._resumed)
                if idle > (deadlines.idle if _has_begun(beats) else deadlines.start):
                    self.is_idle, self.has_begun = True, _has_begun(beats)
                    self._abort(None)
                    return idle
        self._drain()
        return None

    def _seconds_damaged(self) -> float:
        """For how long it has done nothing since it said that its memory is damaged."""
        if not self._said_damage:
            return 0.0
        ticks = job.ticks_of_group(self.job.process.pid)
        if ticks != self._ticks or self._resumed > self._quiet_since:
            self._ticks, self._quiet_since = ticks, time.monotonic()
        return time.monotonic() - self._quiet_since

    def interrupt(self) -> None:
        """Hand Ctrl-C on; the third one ends the child."""
        self.num_interrupts += 1
        if self.num_interrupts > 2:
            self.job.send(signal.SIGKILL)
        else:
            self.job.send(signal.SIGINT)

    def stderr(self) -> str:
        """What was kept."""
        head, tail, num_lost = bytes(self._head), bytes(self._tail), self._num_lost
        if num_lost:
            # Whole lines only: half of a password would not be known as one.
            head, tail = head[: head.rfind(b"\n") + 1] or head, tail[tail.find(b"\n") + 1 :]
            num_lost += len(self._head) + len(self._tail) - len(head) - len(tail)
            head += f"\n[... {num_lost} bytes left out ...]\n".encode()
        return (head + tail).decode(errors="replace")

    def _abort(self, pid: int | None) -> None:
        """SIGABRT: Python writes the stack of every thread, even of one that is stuck in C.

        Without a `pid` all processes of the group get it, for any of them may be who waits. One
        that is stopped must go on for that.
        """
        self._dump()
        with contextlib.suppress(OSError):
            # Only a process of the child's own group, whatever its ring claims.
            group = self.job.process.pid
            if pid is None:
                os.killpg(group, signal.SIGABRT)
            else:
                os.kill(pid if os.getpgid(pid) == group else group, signal.SIGABRT)
        self.job.send(signal.SIGCONT)
        stop = time.monotonic() + _ABORT_SECONDS
        # A shell ends at once, and what it started still writes.
        while time.monotonic() < stop and (self.job.process.poll() is None or not self._is_closed):
            self._read(_TICK_SECONDS)
        self.job.send(signal.SIGKILL)
        self.job.process.wait()
        self._drain()

    def _leave(self) -> None:
        """SIGTERM to all of it, and SIGKILL to what does not go."""
        self.job.send(signal.SIGTERM)
        self.job.send(signal.SIGCONT)
        stop = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < stop and self.job.process.poll() is None:
            self._read(_TICK_SECONDS)
        self.job.send(signal.SIGKILL)
        self.job.process.wait()
        self._drain()

    def _dump(self) -> None:
        """Have the GPUs say where they stand, as long as that may take."""
        before = self.dumps.num_whole()
        wanted = before + self.dumps.ask()
        stop = time.monotonic() + DUMP_SECONDS
        while self.dumps.num_whole() < wanted and time.monotonic() < stop:
            self._read(_TICK_SECONDS)
        if job.ask_agents(self.job.process.pid):
            while time.monotonic() < stop and self._read(_QUIET_SECONDS):
                pass

    def _drain(self) -> None:
        """Take what is there still; what others go on to write is passed on after us."""
        stop = time.monotonic() + _DRAIN_SECONDS
        while self._read(max(stop - time.monotonic(), 0.0)):
            pass
        pipe = self.job.process.stderr
        if pipe is not None:
            if not self._is_closed:
                job.go_on_passing(pipe.fileno())
            pipe.close()

    def _read(self, seconds: float) -> bool:
        """Take what has come within so many seconds; False when nothing did."""
        pipe = self.job.process.stderr
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], seconds)
        data = os.read(pipe.fileno(), 65536) if ready else b""
        if not data:
            if ready:  # closed, though the child may go on
                self._is_closed = True
                time.sleep(min(seconds, 0.02))
            return False
        self._said_damage = self._said_damage or _DAMAGE.search(data) is not None
        self.pass_on(data)
        room = _HEAD_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * _TAIL_BYTES:
            self._num_lost += len(self._tail) - _TAIL_BYTES
            del self._tail[:-_TAIL_BYTES]
        return True


@contextlib.contextmanager
def _handing_on(child: _Child) -> Iterator[None]:
    """Within, Ctrl-C goes to the child, which has a session of its own, and not to us."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        child.interrupt()

    previous = signal.getsignal(signal.SIGINT)
    is_handed_on = previous != signal.SIG_IGN
    if is_handed_on:
        try:
            signal.signal(signal.SIGINT, hand_on)
        except ValueError:  # not the main thread: no Ctrl-C arrives here
            is_handed_on = False
    if not is_handed_on:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


#: What is known of each process that records.
_Beats = dict[Path, ring.Heartbeat]


def _beats(runs: Path) -> _Beats:
    found = ((folder, ring.read_heartbeat(folder)) for folder in ring.run_folders(runs))
    return {folder: beat for folder, beat in found if beat is not None}


def _has_begun(beats: _Beats) -> bool:
    return any(beat.step for beat in beats.values())


def _is_within_step(beats: _Beats) -> bool:
    return any(
        not beat.is_clean and beat.step_started_ns is not None and ring.is_alive(folder)
        for folder, beat in beats.items()
    )


def _late_step(beats: _Beats, deadlines: Deadlines, resumed: float) -> tuple[int, float] | None:
    """Process and seconds of a step past its deadline; before `resumed` nothing counts."""
    for folder, beat in beats.items():
        if beat.is_clean or beat.step_started_ns is None:
            continue
        seconds = time.monotonic() - max(beat.step_started_ns / 1e9, resumed)
        limit = deadlines.first_step if beat.step <= 1 else deadlines.step
        if seconds > limit and ring.is_alive(folder):
            return beat.pid, seconds
    return None
