"""A tool of others that has told all it tells is ended, and one that may tell more is not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hypocenter.cli.child_run import how
from hypocenter.doctor.surfaced import symptom_of
from hypocenter.record.gpu_stop import MAX_REPORTS
from hypocenter.watch import sanitizers
from hypocenter.watch.child import Deadlines, Ended, environment_for, watch
from hypocenter.watch.collect import collect

#: A stand-in for compute-sanitizer: tells of so many accesses, and goes on for so many seconds.
TOOL = """
at=0
while [ $at -lt {num} ]; do
  echo "========= Invalid __global__ write of size 4 bytes"
  echo "=========     at rows+0x10 in rows.cu:4"
  echo "=========     by thread ($at,0,0) in block (8,0,0)"
  at=$((at + 1))
done > "$1/memcheck-$$"
sleep {seconds}
exit 6
"""


def run_tool(folder: Path, num: int, seconds: float) -> Ended:
    """How it ended, by itself or by us."""
    command = ["sh", "-c", TOOL.format(num=num, seconds=seconds), "sh", str(folder)]
    deadlines = Deadlines(enough=sanitizers.enough_reports(folder))
    return watch(command, environment_for(folder), folder, lambda data: None, deadlines)


def test_a_tool_that_has_told_all_it_tells_and_goes_on_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitizers, "LAST_SECONDS", 0.3)
    begun = time.monotonic()
    ended = run_tool(tmp_path, MAX_REPORTS, 100)
    assert time.monotonic() - begun < 60
    assert ended.enough == "compute-sanitizer had told of 16 accesses"
    assert how(ended) == "compute-sanitizer had told of 16 accesses, so the command was ended"
    reports = sanitizers.reports_below(tmp_path)
    assert [report.thread for report in reports] == [(at, 0, 0) for at in range(MAX_REPORTS)]
    bundle = collect(tmp_path, ended, suspect=True, reports=reports)
    assert bundle is not None
    assert symptom_of(bundle.fault) == (
        "error: compute-sanitizer had told of 16 accesses, and the command was ended"
    )
    assert bundle.fault.signal is None  # nobody else sent it


@pytest.mark.parametrize(
    ("num", "seconds"),
    [(MAX_REPORTS - 1, 1.0), (MAX_REPORTS, 0)],
    ids=["it may tell more", "it ends by itself"],
)
def test_a_tool_is_left_to_its_own_end(
    num: int, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num < MAX_REPORTS:
        monkeypatch.setattr(sanitizers, "LAST_SECONDS", 0.3)
    ended = run_tool(tmp_path, num, seconds)
    assert (ended.exit_code, ended.enough) == (6, "")
    assert how(ended) == "the command ended with exit code 6"
