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
