"""Ctrl-C ends the command with 130 and one line: before it has begun, and while kernels compile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from outside.terminal import AS_A_PERSON, TIMEOUT_SECONDS

from hypocenter.cli import interrupt
from hypocenter.cli.progress import ProgressDisplay


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    # A run in the background inherits that Ctrl-C is ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    interrupt._held = False
    signal.signal(signal.SIGINT, previous)


def press_in(module: str) -> None:
    """Ctrl-C while a function of `module` is being called."""
    names = {"__name__": module, "signal": signal}
    exec("def run():\n    signal.raise_signal(signal.SIGINT)\n    return None\n", names)
    names["run"]()  # type: ignore[operator]


def test_outside_the_compiler_it_is_raised_at_once() -> None:
    with interrupt.handle_interrupts(), pytest.raises(KeyboardInterrupt):
        press_in("hypocenter.kernels.rowwise.norm")


@pytest.mark.parametrize("module", ["numba.core.dispatcher", "llvmlite.binding.executionengine"])
def test_inside_the_compiler_it_waits_for_the_next_progress(module: str) -> None:
    with interrupt.handle_interrupts(), ProgressDisplay() as progress:
        press_in(module)
        with pytest.raises(KeyboardInterrupt):
            progress("compiling kernel norm", 0.5)
        progress("compiling kernel norm", 0.5)  # one Ctrl-C interrupts once


def test_one_that_was_held_back_is_never_lost() -> None:
    with pytest.raises(KeyboardInterrupt), interrupt.handle_interrupts():
        press_in("numba.core.compiler")


def test_a_second_one_inside_the_compiler_ends_the_process() -> None:
    program = (
        "import signal\nfrom hypocenter.cli import interrupt\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "names = {'__name__': 'numba.core', 'press': lambda: signal.raise_signal(signal.SIGINT)}\n"
        "with interrupt.handle_interrupts():\n"
        "    for _ in range(2): exec('press()', names)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    told = b"hypo: stopping after this kernel; Ctrl-C again stops at once\n"
    assert (done.returncode, done.stderr) == (-signal.SIGINT, told)


def test_who_ignores_it_goes_on_ignoring_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupt.handle_interrupts():
        press_in("hypocenter.cli.app")
        press_in("numba")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_before_the_command_is_loaded_there_is_no_traceback() -> None:
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == "cyclopts":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Presses())
from hypocenter.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (130, "hypo: interrupted\n")


@pytest.mark.tier("sim")  # compiles kernels anew
def test_while_kernels_compile(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*AS_A_PERSON, "run", "-p", "import os", "-n", "2", "-t", "1"],
        env={**os.environ, "HYPO_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    with process:
        for line in process.stderr:
            if "compiling" in line:
                break
        assert "at the first run only" in line
        process.send_signal(signal.SIGINT)
        stderr = process.stderr.read()
        assert process.wait(TIMEOUT_SECONDS) == 130, stderr
    assert stderr.splitlines()[-1] == "hypo: interrupted"
    assert "Traceback" not in stderr
