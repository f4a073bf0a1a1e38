"""A test that hangs is ended with the stack of every thread; a warning is a failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from repository import ROOT

HANGING_TEST = """
import threading

def waits_in_a_thread(event):
    event.wait()

def test_hangs():
    event = threading.Event()
    threading.Thread(target=waits_in_a_thread, args=(event,), daemon=True).start()
    event.wait()
"""

WARNING_TEST = """
import warnings

def test_warns():
    warnings.warn("this should not pass", stacklevel=1)
"""


def _run_victim(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run one test file under this project's own pytest settings."""
    victim = folder / "test_victim.py"
    victim.write_text(text)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml")]
    command += ["-p", "no:cacheprovider", *options, str(victim)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_hanging_test_is_ended_with_every_stack(tmp_path: Path) -> None:
    done = _run_victim(tmp_path, HANGING_TEST, "-o", "faulthandler_timeout=1")
    assert done.returncode != 0
    assert "test_hangs" in done.stderr, done.stderr
    assert "waits_in_a_thread" in done.stderr, done.stderr


def test_the_watchdog_is_armed(pytestconfig: object) -> None:
    timeout = pytestconfig.getini("faulthandler_timeout")  # type: ignore[attr-defined]
    assert 0 < float(timeout) <= 300


def test_a_warning_is_a_failure(tmp_path: Path) -> None:
    done = _run_victim(tmp_path, WARNING_TEST)
    assert done.returncode == 1
    assert "this should not pass" in done.stdout
