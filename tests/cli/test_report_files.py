"""What `hypo doctor` and `hypo replay` write beside their output: new files, for their owner."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from recorded.bundles import background
from recorded.core_dumps import bundle_folder
from recorded.foreign_launch import TAKE, launch_of

from hypocenter.base.errors import EXIT_FAULT, EXIT_OK, EXIT_USAGE
from hypocenter.cli import app
from hypocenter.record import bundle as bundles

#: Of 100 entries one is too large.
WRONG = [107 if number == 70 else number for number in range(100)]


def hypo(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        app.main([str(word) for word in words])
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bundles.save(background(), tmp_path / "b")
    return tmp_path / "b"


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_the_page_and_the_timeline_stand_beside_the_report(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = folder.parent / "report.html", folder.parent / "trace.json"
    assert hypo("doctor", folder, "--html", page, "--perfetto", trace) == EXIT_FAULT
    out, said = capsys.readouterr()
    assert out.startswith("CAUSE      dtype width")
    assert f"the page is in {page}" in said
    assert "ui.perfetto.dev opens it" in said
    assert page.read_text().startswith("<!DOCTYPE html>\n<html lang=")
    assert f"hypo replay {folder} --step 1 --launch 1" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert (mode(page), mode(trace)) == (0o600, 0o600)


def test_a_command_has_a_page_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    page, bundle = tmp_path / "page.html", tmp_path / "b"
    run = (sys.executable, "-m", "hypocenter.cli.demo_run", "cpu")
    assert hypo("doctor", "--out", bundle, "--html", page, "--", *run) == EXIT_FAULT
    text = page.read_text()
    assert "Block table entry out of range" in text
    # A kernel of the CPU is no Triton kernel.
    assert "--export" not in text


@pytest.mark.tier("whole")
def test_the_last_run_has_a_page_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("HYPO_RUN_DIR", str(tmp_path / "runs"))
    command = [sys.executable, "-m", "hypocenter.cli.demo_run", "sim:mi300x"]
    died = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert died.returncode == -signal.SIGABRT
    page = tmp_path / "page.html"
    assert hypo("doctor", "--last", "--out", tmp_path / "b", "--html", page) == EXIT_FAULT
    assert "Dtype width" in page.read_text()


@pytest.mark.parametrize("form", ["--json", "--markdown"])
def test_other_forms_take_a_page_beside_them(
    form: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = folder.parent / "report.html"
    assert hypo("doctor", folder, form, "--html", page) == EXIT_FAULT
    assert capsys.readouterr().out.startswith("{" if form == "--json" else "# dtype width")
    assert "Where it shows" in page.read_text()


def test_the_json_report_has_the_finding_of_a_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    bundles.save(launch_of(TAKE, WRONG), tmp_path / "b")
    assert hypo("doctor", tmp_path / "b", "--json", "--run-sources") == EXIT_FAULT
    [root] = json.loads(capsys.readouterr().out)["roots"]
    assert root["finding"]["kind"] == "out of bounds"
    assert root["finding"]["number"] == 107


@pytest.mark.parametrize("option", ["--html", "--perfetto"])
def test_no_file_is_overwritten_and_no_folder_made(
    option: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = folder.parent / "there"
    there.write_text("mine")
    assert hypo("doctor", folder, option, there) == EXIT_USAGE
    assert f"{option} {there} is there already" in capsys.readouterr().err
    assert there.read_text() == "mine"
    link = folder.parent / "link"
    link.symlink_to(folder.parent / "nowhere")
    assert hypo("doctor", folder, option, link) == EXIT_USAGE
    assert hypo("doctor", folder, option, folder.parent / "no" / "x.html") == EXIT_USAGE
    assert "make it first" in capsys.readouterr().err


def test_a_command_does_not_run_for_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    ran, there = tmp_path / "ran", tmp_path / "there"
    there.touch()
    assert hypo("doctor", "--html", there, "--", "touch", ran) == EXIT_USAGE
    assert not ran.exists()


def test_an_exported_launch_says_what_is_expected(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    file = folder.parent / "repro.py"
    assert hypo("replay", folder, "--export", file) == EXIT_OK
    assert "expected is dtype width: argument positions of kernel rope" in capsys.readouterr().err
    text = file.read_text()
    assert "#     dtype width: argument positions of kernel rope" in text.splitlines()
    assert "def rope_kernel(" in text
    assert mode(file) == 0o600
    assert hypo("replay", folder, "--export", file) == EXIT_USAGE
    other = folder.parent / "other.py"
    assert hypo("replay", folder, "--json", "--export", other) == EXIT_USAGE
    assert not other.exists()


def test_a_foreign_source_does_not_run_at_export(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    bundles.save(launch_of(TAKE, WRONG), tmp_path / "b")
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    assert hypo("replay", tmp_path / "b", "--export", first) == EXIT_OK
    assert "not known: take_entry_kernel is the program's own kernel" in first.read_text()
    assert hypo("replay", tmp_path / "b", "--export", second, "--run-sources") == EXIT_OK
    assert "out of bounds: load of x in take_entry_kernel" in second.read_text()


def test_an_entry_that_a_core_dump_tells_is_in_the_exported_file(tmp_path: Path) -> None:
    """Nobody recorded it, and with a zero there nothing would go wrong."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    folder, file = bundle_folder("far_index", tmp_path), tmp_path / "repro.py"
    assert hypo("replay", folder, "--export", file, "--run-sources") == EXIT_OK
    done = subprocess.run(
        [sys.executable, str(file)], env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "reproduced: SIGSEGV" in done.stdout
