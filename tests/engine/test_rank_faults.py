"""A rank that faults or dies: of the records of all ranks the doctor takes what began it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hypocenter.doctor.causes import Cause

PROGRAM = """
import sys
from hypocenter import LLM
from hypocenter.engine.ranks import ranks

OTHER = '''
import os, signal, sys
from dataclasses import replace
from hypocenter.engine.ranks import messages, program

made, seen = messages.Step.batch, []

def planted(step):
    batch = made(step)
    seen.append(batch)
    return PLANT

messages.Step.batch = planted
program.main(int(sys.argv[1]))
'''.replace("PLANT", sys.argv[1])
popen = ranks.subprocess.Popen
ranks.subprocess.Popen = lambda command, **given: popen(
    [sys.executable, "-c", OTHER, command[-1]], **given
)
with LLM(device="sim:h200", tensor_parallel=2, context_length=64) as llm:
    llm.generate("a", max_tokens=3)
"""
WRONG_SLOTS = "replace(batch, slots=batch.slots + 2**20)"
DEATH = "batch if len(seen) < 2 else os.kill(os.getpid(), signal.SIGKILL)"


def report_of(plant: str, folder: Path) -> dict[str, Any]:
    (folder / "program.py").write_text(PROGRAM)
    doctor = [sys.executable, "-m", "hypocenter", "doctor", "--json", "-o", str(folder / "bundle")]
    command = [sys.executable, str(folder / "program.py"), plant]
    done = subprocess.run([*doctor, "--", *command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 3, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.tier("sim")  # `tests/doctor/test_other_ranks.py` has the records alone
def test_the_fault_of_another_rank_is_found_in_its_own_record(tmp_path: Path) -> None:
    report = report_of(WRONG_SLOTS, tmp_path)
    root = report["roots"][0]
    assert root["cause"] == Cause.INDEX_RANGE.value
    assert root["argument"] == "slots"
    assert "after it recorded: " in report["symptom"]


@pytest.mark.tier("sim")
def test_a_rank_that_was_killed_is_named_with_the_collective_that_waited(tmp_path: Path) -> None:
    report = report_of(DEATH, tmp_path)
    root = report["roots"][0]
    assert root["cause"] == Cause.LOST_RANK.value
    assert root["kernel"] in ("all_reduce", "all_gather")
    assert "rank 1 of 2, process " in root["sentence"]
    assert "ended by SIGKILL" in root["sentence"]
    assert root["proof"]["green"].startswith("1 step before ended")
