"""`hypo check` on programs as people write them: healthy ones run through, faults are named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pytest
from terminal import hypo_in_process

pytest.importorskip("torch")
pytest.importorskip("triton")

from hypocenter.check.report import CheckReport

PROGRAMS = Path(__file__).parent / "programs"


def check(*arguments: str) -> tuple[CheckReport, subprocess.CompletedProcess[str]]:
    done = hypo_in_process("check", "--json", *arguments)
    assert done.stdout, done.stderr
    return msgspec.json.decode(done.stdout, type=CheckReport), done


def test_a_program_finds_what_it_takes_of_a_gpu_by_name(tmp_path: Path) -> None:
    out = tmp_path / "facts.json"
    path = str(PROGRAMS / "takes_by_name.py")
    report, done = check(path, "--arch", "h200", "--", str(out))
    assert done.returncode == 0, done.stderr
    assert report.error is None
    assert json.loads(out.read_text()) == {
        "fields": [],
        "is_properties": True,
        "name": "H200",
        "capability": [9, 0],
        "asked": [9, 0],
        "processors": [132, 132],
        "shared": [227 << 10, 227 << 10],
        "has_memory": True,
        "is_built": True,
        "devices": [1, 0],
    }
    assert len(report.launches) == 3


def test_configurations_that_run_the_same_programs_are_run_once() -> None:
    report, done = check(str(PROGRAMS / "same_programs.py"))
    assert done.returncode == 4, done.stderr
    run = [(launch.kernel, launch.configuration) for launch in report.launches]
    once = "num_warps=2|4, num_stages=2|3"
    apart = ("num_warps=2, num_stages=2", "num_warps=4, num_stages=2|3")
    blocks = ("BLOCK=32", "BLOCK=64")
    expected = [("plain", f"{block}, {once}") for block in blocks]
    # A heuristic of one and a parameter of the other hang on num_warps.
    for kernel in ("by_warps", "sees_warps"):
        expected += [(kernel, f"{block}, {options}") for block in blocks for options in apart]
    assert sorted(set(run)) == sorted(expected)
    assert len(run) == len(expected) + 3  # the second launch of each takes the last
    (finding,) = report.findings
    assert finding.configuration == f"BLOCK=64, {once}"
