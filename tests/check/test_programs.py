"""`hypo check` on programs as people write them: healthy ones run through, faults are named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pytest
from outside.checked import hypo_check

pytest.importorskip("torch")
pytest.importorskip("triton")

from hypocenter.check import check as checker
from hypocenter.check.report import CheckedLaunch, CheckReport, report_text
from hypocenter.check.runtime import CheckRequest, End, Line
from hypocenter.replay.findings import Coverage, Finding, StridedShape
from hypocenter.replay.text import finding_text

PROGRAMS = Path(__file__).parent / "programs"


def check(*arguments: str) -> tuple[CheckReport, subprocess.CompletedProcess[str]]:
    done = hypo_check(*arguments)
    assert done.stdout, done.stderr
    return msgspec.json.decode(done.stdout, type=CheckReport), done


@pytest.mark.tier("whole")
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


@pytest.fixture(scope="module")
def every() -> CheckReport:
    report, done = check(str(PROGRAMS / "every_program.py"))
    assert (done.returncode, report.error) == (4, None), done.stderr
    return report


def of(report: CheckReport, name: str) -> list[tuple[Finding, str]]:
    """The findings of a program, each with the text of the line that launched it."""
    found = []
    for finding in report.findings:
        site = finding.launched_at
        assert site is not None
        if Path(site.file).stem == name:
            text = Path(site.file).read_text().splitlines()[site.line - 1]
            found.append((finding, text.strip()))
    return found


def test_configurations_that_run_the_same_programs_are_run_once(every: CheckReport) -> None:
    tuned = ("plain", "by_warps", "sees_warps")
    run = [(one.kernel, one.configuration) for one in every.launches if one.kernel in tuned]
    once = "num_warps=2|4, num_stages=2|3"
    apart = ("num_warps=2, num_stages=2", "num_warps=4, num_stages=2|3")
    blocks = ("BLOCK=32", "BLOCK=64")
    expected = [("plain", f"{block}, {once}") for block in blocks]
    # A heuristic of one and a parameter of the other hang on num_warps.
    for kernel in ("by_warps", "sees_warps"):
        expected += [(kernel, f"{block}, {options}") for block in blocks for options in apart]
    assert sorted(run) == sorted(expected)
    ((finding, _),) = of(every, "same_programs")
    assert finding.configuration == f"BLOCK=64, {once}"


def test_a_scatter_is_no_alarm_until_somebody_reads_what_it_left(every: CheckReport) -> None:
    found = of(every, "pool")
    assert [(finding.kind, finding.kernel) for finding, _ in found] == [
        ("never written", "write_rows"),
        ("never written", "write_rows"),
        ("never written", "write_first"),
    ]
    comments = [text.partition("  # ")[2] for _, text in found]
    assert comments == ["slot 6 is read", "all is read", "no scatter"]


def test_a_finding_names_the_strides_of_what_is_not_packed(every: CheckReport) -> None:
    found = [finding for finding, _ in of(every, "strides")]
    layouts = [(finding.kind, finding.operation, finding.layout) for finding in found]
    expanded, transposed = StridedShape((4, 100), (0, 1)), StridedShape((16, 8), (1, 16))
    assert layouts == [
        ("out of bounds", "load", expanded),
        ("out of bounds", "store", expanded),
        ("race", "store", expanded),
        ("never written", "launch", transposed),
    ]
    assert "    x_ptr is expanded: shape (4, 100), strides (0, 1)\n" in finding_text(found[0])
    assert finding_text(found[-1]).endswith(
        "    x_ptr is not contiguous: shape (16, 8), strides (1, 16)"
    )
    assert all(finding.layout is None for finding, _ in of(every, "pool"))


@pytest.mark.tier("sim")  # three runs of a program
def test_several_gpus_are_told_apart_and_share_the_budget() -> None:
    path = str(PROGRAMS / "by_device.py")
    report, done = check(path, "--arch", "rtx4090,sm_90,gfx942", "--budget", "30")
    assert done.returncode == 4, done.stderr
    assert report.archs == ("sm_89", "sm_90", "gfx942")
    found = {(finding.kernel, finding.kind): finding.archs for finding in report.findings}
    assert found == {
        ("sums", "race"): ("sm_89", "gfx942"),
        ("last", "out of bounds"): ("sm_89", "sm_90", "gfx942"),
    }
    assert report.error is not None
    assert report.error.startswith("as on gfx942: ")
    assert "no AMD GPU yet" in report.error
    text = report_text(report)
    assert "\n    shows as on sm_89, gfx942; not as on sm_90\n" in text
    assert "\n    shows as on all 3\n" in text
    assert "\n    sums: 1 launch, 5 of 5 programs, as on sm_90\n" in text
    assert "\n    last: 1 launch, 1 of 1 programs\n" in text
    assert "2 findings in 6 launches of 2 kernels, as on sm_89, sm_90, gfx942;" in text


def test_each_gpu_gets_an_equal_part_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, float]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        request = msgspec.json.decode(command[-1], type=CheckRequest)
        asked.append((request.arch, request.budget_seconds))
        line = Line(launch=CheckedLaunch("k", (1, 1, 1), Coverage(1, 1, 1, 0.0), None))
        ends = msgspec.json.encode(Line(end=End()))
        Path(request.report).write_bytes(msgspec.json.encode(line) + b"\n" + ends + b"\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    path = tmp_path / "program.py"
    path.touch()
    report = checker.check(
        path, kernel=None, arguments=(), archs=["sm_89", "sm_90"], budget_seconds=60
    )
    assert asked == [("sm_89", 30), ("sm_90", 30)]
    assert [launch.arch for launch in report.launches] == ["sm_89", "sm_90"]
