"""A command below the doctor is a job of the terminal, and ends with its doctor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from outside.terminal import HYPO, SHELL, TIMEOUT_SECONDS, Terminal, on_terminal

DOCTOR = " ".join([*HYPO, "doctor", "--"])
#: Counts on the terminal, in a child of a shell: a group and not a process is what is stopped.
COUNTS = "import itertools, sys, time\nfor n in itertools.count():\n    print('n', n, flush=True)\n"
COUNTS += "    time.sleep(0.05)\n"
ONE_STEP = """
import os, time
from pathlib import Path
from hypocenter.record import ring
from hypocenter.record.ring_writer import RingWriter
writer = RingWriter(Path(os.environ["HYPO_RUN_DIR"], "1-1"))
writer.header[ring.CELL_STEP] = 2
writer.header[ring.CELL_STEP_STARTED] = time.monotonic_ns()
print("begun", flush=True)
time.sleep(5)
print("done", flush=True)
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """A shell with job control in an empty folder, with a program in it that counts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PS1", "ready$ ")
    (tmp_path / "counts.py").write_text(COUNTS)
    with on_terminal([], SHELL) as terminal:
        terminal.wait_for("ready$ ")
        yield terminal


def _command(shell: Terminal, line: str) -> int:
    """Type it; returns where its output begins."""
    at = len(shell.seen)
    shell.type(line + "\n")
    return shell.wait_for("\n", after=at)


def test_ctrl_z_stops_all_and_fg_lets_it_go_on(shell: Terminal) -> None:
    at = _command(shell, f"{DOCTOR} sh -c '{sys.executable} counts.py; :'")
    shell.wait_for("n 5", after=at)
    shell.type("\x1a")
    at = shell.wait_for("Stopped", after=at)
    shell.wait_for("ready$ ", after=at)
    seen = len(shell.seen)
    at = _command(shell, "sleep 0.5; echo still")
    shell.wait_for("still\r\n", after=at)
    assert "n " not in shell.seen[seen:], "the command goes on counting, though it was stopped"
    at = _command(shell, "fg")
    at = shell.wait_for("\nn ", after=at)
    shell.wait_for("\nn ", after=at)
    shell.type("\x03")
    at = shell.wait_for("ready$ ", after=at)
    at = _command(shell, "echo code $?")
    shell.wait_for("code 130", after=at)


def test_a_command_may_ask_its_terminal(shell: Terminal) -> None:
    at = _command(shell, f"{DOCTOR} sh -c 'read x < /dev/tty; echo got $x'")
    shell.type("this\n")
    shell.wait_for("got this", after=at)
    at = _command(shell, "read y; echo again $y")  # the shell has its terminal back
    shell.type("that\n")
    shell.wait_for("again that", after=at)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _heed_quit() -> None:
    """What a shell starts in the background ignores SIGQUIT, and so do these tests there."""
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def _until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGQUIT, signal.SIGUSR1, signal.SIGTERM])
def test_all_of_the_command_ends_with_its_doctor(tmp_path: Path, number: signal.Signals) -> None:
    """A grandchild on the GPU would hold its memory otherwise, and nobody would know why."""
    process = subprocess.Popen(
        [*HYPO, "doctor", "--", "sh", "-c", "sleep 60 & echo $! >&2; wait"],
        stderr=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=_heed_quit,
    )  # fmt: skip
    assert process.stderr is not None
    pid = int(process.stderr.readline())
    assert not _gone(pid)
    process.send_signal(number)
    process.communicate(timeout=30)  # long before it would end by itself
    assert _until(lambda: _gone(pid))


def test_what_is_left_in_the_background_goes_on_and_is_heard(tmp_path: Path) -> None:
    """It died of SIGPIPE, at the first word after the end of the doctor."""
    late = f"sleep 2; echo late >&2; echo lived > {tmp_path}/lived"
    done = subprocess.run(
        [*HYPO, "doctor", "--", "sh", "-c", f"({late}) & echo early >&2"],
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.startswith("early\n")
    assert "late\n" in done.stderr
    assert _until((tmp_path / "lived").exists)


@pytest.mark.tier("sim")  # waits for seconds
def test_a_stopped_command_is_not_past_its_deadline(shell: Terminal) -> None:
    Path("steps.py").write_text(ONE_STEP)
    at = _command(shell, f"{' '.join(HYPO)} doctor --deadline 6 -- {sys.executable} steps.py")
    at = shell.wait_for("begun", after=at)
    shell.type("\x1a")
    at = shell.wait_for("Stopped", after=at)
    time.sleep(4)
    at = _command(shell, "fg")
    shell.wait_for("done", after=at)


def test_nothing_of_ours_is_left(tmp_path: Path) -> None:
    """No guardian and nobody who passes on stays behind a command that left nothing behind."""
    mark = f"hypo-{os.getpid()}-{time.monotonic_ns()}"
    subprocess.run(
        [*HYPO, "doctor", "--", "sh", "-c", "true"], cwd=tmp_path, check=True,
        capture_output=True, timeout=TIMEOUT_SECONDS, env={**os.environ, "MARK_OF_TEST": mark},
    )  # fmt: skip
    left = [
        path
        for path in Path("/proc").glob("[0-9]*/environ")
        if os.access(path, os.R_OK) and mark.encode() in _bytes(path)
    ]
    assert left == []


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
