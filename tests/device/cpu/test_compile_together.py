"""Helpers compile what is left on disk for who asked, and nothing hangs on them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from outside.terminal import TIMEOUT_SECONDS
from repository import PACKAGE_DIR

from hypocenter.base.tensor import DType
from hypocenter.device.cpu import compile_together
from hypocenter.device.cpu.lang import kinds_of
from hypocenter.kernels.rowwise.activation_cpu import gate, scale
from hypocenter.kernels.weights.cpu_layout import RECORDS

PROGRAM = """
import sys
import numpy as np
from hypocenter.device.cpu import compile_together
from hypocenter.kernels.rowwise.activation_cpu import scale, softcap
from hypocenter.kernels.rowwise.embedding_cpu import gather, narrow
compile_together._num_helpers = lambda num_kernels: 1
{change}
x, counts = np.ones((2, 64), np.float32), np.array([2, 1], np.int32)
rows = np.array([1, 0], np.int32)
wanted = [
    (scale.shared, (x, counts, 0, 2.0)),
    (softcap.serial, (x, counts, 0, 2.0)),
    (gather.serial, (x, rows, counts, 1, np.zeros((2, 64), np.float32))),
    (narrow.serial, (x, counts, np.zeros((2, 32), np.float32))),
    (scale.serial, (x[:, ::2], counts, 0, 2.0)),
    (scale.serial, (x, counts, 0, 2.0)),
]
told = []
compile_together.compile_together(wanted, told.append)
scale.serial(x, counts, 0, 2.0)
assert x[:, 0].tolist() == [2, 2]
from_disk = [sum(made.stats.cache_hits.values()) for made in set(next(zip(*wanted)))]
print(sum(from_disk), all(made.overloads for made, _ in wanted), len(set(told)))
"""


def _run(folder: Path, change: str = "") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(change=change)],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(PACKAGE_DIR.parent),
            "HYPO_CACHE_DIR": str(folder),
        },
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_a_helper_compiles_what_is_then_loaded(tmp_path: Path) -> None:
    num_loaded, is_complete, num_here = _run(tmp_path)
    assert is_complete == "True"
    assert int(num_loaded) >= 1
    assert int(num_loaded) + int(num_here) >= 6


SLOW_TO_COME = """
def none_here(waiting):
    import time
    while waiting: time.sleep(0.01)
    return iter(())
compile_together.taken_from = none_here
"""


def test_a_helper_can_do_all_of_it(tmp_path: Path) -> None:
    """Records, arrays with gaps and both forms of a kernel can be told of."""
    assert _run(tmp_path, SLOW_TO_COME)[:2] == ["6", "True"]


def test_what_a_helper_fails_at_is_compiled_here(tmp_path: Path) -> None:
    change = """
from hypocenter.device import helper_processes
feed = helper_processes._feed
def broken(process, waiting, lines):
    process.kill()
    process.wait()
    feed(process, waiting, lines)
helper_processes._feed = broken
"""
    assert _run(tmp_path, change)[:2] == ["0", "True"]


def test_an_end_in_between_takes_the_helpers_along(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []
    popen = subprocess.Popen

    def noted(*args: object, **options: object) -> object:
        processes.append(popen(*args, **options))  # type: ignore[call-overload]
        return processes[-1]

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(compile_together, "_num_helpers", lambda _: 2)
    x, counts = np.ones((2, 64), np.float32), np.array([2, 1], np.int32)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_together.compile_together([(scale.serial, (x, counts, 0, 2.0))], interrupt)
    assert time.monotonic() - started < 10
    assert [process.poll() is not None for process in processes] == [True, True]


def test_arguments_are_describe_of_as_they_are() -> None:
    records = np.zeros((2, 3, 4), RECORDS[DType.Q4_K].record)
    args = (records, np.ones((4, 4), np.uint16)[:, ::2], 7, 1.5, True, np.float32(2))
    task = compile_together._Task(
        "m", "n", False, [compile_together._describe(one) for one in args]
    )
    assert kinds_of(compile_together._args_of(task)) == kinds_of(args)
    assert compile_together._task_of(gate.serial, args) is not None
    assert compile_together._task_of(gate.serial, (1 << 63,)) is None


def test_few_kernels_are_compiled_alone() -> None:
    assert compile_together._num_helpers(compile_together._MIN_KERNELS - 1) == 0
