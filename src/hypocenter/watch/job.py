"""A command as a job of our terminal, as a shell runs one, which ends when we do.

The command has a process group of its own, so that all of it can be ended, and our session, so that
it has our terminal: Ctrl-C, Ctrl-Z and Ctrl-\\ reach it, and it may ask a person. See "Job Control"
in the manual of the GNU C library.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hypocenter.base.errors import UsageError
from hypocenter.coredump.rocm import AGENT
from hypocenter.watch.prepared import take

#: What a terminal stops a process with; SIGSTOP is somebody's own wish.
_TERMINAL_STOPS = frozenset({signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
#: A word on stdin lets it go; when stdin ends without one, we have died.
_GUARDIAN = """read -r _ && exit
kill -s TERM -- -"$1"
sleep 2
kill -s KILL -- -"$1"
"""


class TerminalJob:
    """A process and its group; `process` has its stderr as a pipe."""

    def __init__(self, process: subprocess.Popen[bytes], *, apart: bool = False) -> None:
        self.process = process
        self._terminal = None if apart else _open_terminal()
        self._guardian = subprocess.Popen(
            ["/bin/sh", "-c", _GUARDIAN, "sh", str(process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._lend_terminal()

    def follow(self) -> bool:
        """Stop when the command was stopped from the terminal; whether that has happened.

        Whoever lets us go on lets the command go on, in the foreground when we are there.
        """
        self._lend_terminal()
        try:
            found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:
            return False
        if found is None or found.si_status not in _TERMINAL_STOPS:
            return False
        # It may have asked the terminal for something just before it was lent.
        is_foreground = self._terminal is not None and self._foreground() == self.process.pid
        if found.si_status == signal.SIGTSTP or not is_foreground:
            self._take_terminal_back()
            os.killpg(os.getpgrp(), signal.SIGTSTP)
            self._lend_terminal()
        self.send(signal.SIGCONT)
        return True

    def send(self, number: int) -> None:
        """Send a signal to all of the command."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Take the terminal back; what the command left in the background may go on."""
        was_lent = self._take_terminal_back()
        if self._guardian.stdin is not None:
            with contextlib.suppress(OSError):
                self._guardian.stdin.write(b"gone\n")
                self._guardian.stdin.close()
        self._guardian.wait()
        if self._terminal is not None:
            os.close(self._terminal)
        code = self.process.returncode
        if was_lent and code in (-signal.SIGINT, 128 + signal.SIGINT):
            # Ctrl-C is for all that was typed: the script or the pipeline that we are part of.
            with _ignoring(signal.SIGINT):
                os.killpg(os.getpgrp(), signal.SIGINT)

    def _foreground(self) -> int:
        assert self._terminal is not None
        try:
            return os.tcgetpgrp(self._terminal)
        except OSError:  # hung up
            return -1

    def _lend_terminal(self) -> None:
        if self._terminal is not None and self._foreground() == os.getpgrp():
            self._set_foreground(self.process.pid)

    def _take_terminal_back(self) -> bool:
        """Whether the command had it."""
        if self._terminal is None or self._foreground() != self.process.pid:
            return False
        self._set_foreground(os.getpgrp())
        return True

    def _set_foreground(self, group: int) -> None:
        assert self._terminal is not None
        # Who is not in the foreground would be stopped for asking.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(self._terminal, group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def start_job(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: int | None,
    *,
    apart: bool = False,
) -> Iterator[TerminalJob]:
    """The command as a job, with its stderr as a pipe; ended at the end, if it has not.

    `stdout` is the file descriptor that its stdout goes to instead of ours. A job that is kept
    `apart` has neither our stdin nor our terminal. Raises UsageError when
    there is no such command.
    """
    process = take(command, environment, stdout) if apart else None
    try:
        process = process or subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL if apart else None,
            stdout=stdout,
            stderr=subprocess.PIPE,
            process_group=0,
        )
    except (FileNotFoundError, PermissionError, NotADirectoryError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{command[0]}: {reason}, so nothing was run") from error
    job = TerminalJob(process, apart=apart)
    try:
        yield job
    finally:
        if process.poll() is None:
            job.send(signal.SIGKILL)
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
        job.close()


def go_on_passing(pipe: int) -> None:
    """Go on to pass a pipe to our stderr, for as long as somebody writes to it.

    What a command leaves in the background would die of SIGPIPE otherwise, later than it did.
    """
    # A shell gives /dev/null to what it leaves in the background, unless told otherwise.
    subprocess.run(
        ["/bin/sh", "-c", "exec 3<&0; cat <&3 >&2 &"],
        stdin=pipe,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
    )


@contextlib.contextmanager
def _ignoring(number: signal.Signals) -> Iterator[None]:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def _open_terminal() -> int | None:
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None


def ticks_of_group(group: int) -> int:
    """Processor time that all processes of a group have used, in ticks of the kernel's clock."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            # Behind the name, which may hold anything: state, parent, group; 11 and 12 are times.
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total += int(fields[11]) + int(fields[12])
    return total


#: The signals that a process catches, a bit each (proc_pid_status(5)).
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]{1,16})$", re.M)


def ask_agents(group: int) -> int:
    """Have ROCm's debug agent print where the waves of a process group stand; how many it asked.

    The agent does so at SIGQUIT (its guide, "SIGQUIT"). Only processes that have it loaded and
    catch the signal get it: others would end by it.
    """
    asked = 0
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile, or is not ours
            pid = int(path.name)
            if os.getpgid(pid) != group or AGENT not in (path / "maps").read_text():
                continue
            caught = _CAUGHT.search((path / "status").read_text())
            if caught is not None and int(caught[1], 16) >> signal.SIGQUIT - 1 & 1:
                os.kill(pid, signal.SIGQUIT)
                asked += 1
    return asked
