"""`hypo demo`: it breaks a run, shows the report and names the next command; with Triton or not."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest
from outside.terminal import hypo
from repository import ROOT

from hypocenter.cli import app
from hypocenter.cli.verbs import doctor as cli_doctor
from hypocenter.record import bundle as bundles


def test_a_simulated_gpu_crashes_and_the_report_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    done = hypo("demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CAUSE      dtype width: argument positions of kernel rope_write")
    assert "demo_run.py:" in done.stdout.split("FAULTS AT")[0]
    assert "a planted defect: the position buffer holds 2-byte elements" in done.stderr
    assert "hypo doctor -- python train.py" in done.stdout.split("NEXT")[1]
    assert bundles.load(tmp_path / "hypo-bundle").kind == "crash"


def test_without_triton_the_engine_refuses_a_wrong_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec

    def without_triton(name: str, *more: Any) -> Any:
        return None if name == "triton" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without_triton)
    with pytest.raises(SystemExit) as left:
        app.main(["demo"])
    assert left.value.code == 0
    shown = capfd.readouterr()
    assert "argument block_tables of kernel step" in shown.out
    assert "with Triton installed" in shown.err


def test_a_demo_that_finds_nothing_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli_doctor, "command_of", lambda request: ["sh", "-c", "exit 7"])
    with pytest.raises(SystemExit) as left:
        app.main(["demo"])
    assert left.value.code == 7
    assert "NEXT" not in capfd.readouterr().out


def test_the_commands_that_are_named_next_are_there() -> None:
    lines = [
        shlex.split(line)
        for line in cli_doctor.NEXT.splitlines()
        if line.strip().startswith("hypo")
    ]
    assert len(lines) == 3
    assert {line[1] for line in lines} <= app.own_verbs()


def test_an_issue_asks_for_the_report_and_the_machine() -> None:
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "fault.md").read_text()
    assert template.startswith("---\nname: ")
    for command in ("hypo doctor --markdown", "hypo env"):
        assert command in template
