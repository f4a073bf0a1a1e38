"""Several processes write into one folder of blocks, and some are killed: its bound holds."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hypocenter.engine.disk_room import DiskRoom

BLOCK = 1 << 16
BOUND = 20 * (BLOCK + 200)
#: Blocks until it is killed; each process has the folder of a model of its own.
WRITES = f"""
import sys, time
from pathlib import Path
import numpy as np
from hypocenter.engine.disk_blocks import DiskBlocks
from hypocenter.engine.page_bytes import PageBytes
pages = PageBytes([np.zeros((8, {BLOCK}), np.uint8)])
one = DiskBlocks(Path("c"), pages, 16, sys.argv[1].encode() * 32, {BOUND})
print("ready", flush=True)
for number in range(1 << 20):
    one.put(number.to_bytes(32, "little"), number % 8)
    one.note_step()
    time.sleep(0.004)
"""


def started(folder: Path, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITES, name]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def killed(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.tier("whole")
def test_the_bound_holds_for_all_processes_together(tmp_path: Path) -> None:
    draw, folder = random.Random(1), tmp_path / "c"
    processes = {name: started(tmp_path, name) for name in "abc"}
    most, writers = 0, set()
    try:
        for turn in range(80):
            time.sleep(draw.uniform(0, 0.03))
            if turn % 20 == 19:
                name = draw.choice("abc")
                killed(processes[name])
                processes[name] = started(tmp_path, name)
            with DiskRoom(folder, BOUND)._lock():
                found = list(folder.glob("*/*"))
                sizes = [path.stat().st_size for path in found]
            writers |= {path.parent.name for path in found}
            most = max(most, sum(sizes))
            assert most <= BOUND, sizes
    finally:
        for process in processes.values():
            killed(process)
    assert most > BOUND * 3 / 4, "it was never full"
    assert len(writers) == 3, "each of them came to write"
