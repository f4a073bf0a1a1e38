"""`hypo check` sees uses of memory that nothing orders, without a GPU, and none in order."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from outside.checked import hypo_check

pytest.importorskip("torch")
pytest.importorskip("triton")

from hypocenter.check.report import CheckReport

PROGRAM = Path(__file__).parent / "programs" / "streams.py"


def test_each_fault_is_told_at_its_line_and_nothing_else_is() -> None:
    """The program does all of it in order first, and without waits then."""
    done = hypo_check(str(PROGRAM))
    report = msgspec.json.decode(done.stdout, type=CheckReport)
    assert report.error is None
    lines = PROGRAM.read_text().splitlines()
    expected = {
        (number, marked[1])
        for number, line in enumerate(lines, 1)
        if (marked := re.search(r"# FAULT (.+)", line))
    }
    found = {
        (finding.launched_at.line, str(finding.kind))
        for finding in report.findings
        if finding.launched_at is not None
    }
    assert found == expected
    assert len(report.findings) == len(expected)
    [wait] = [f for f in report.findings if f.kernel == "scale"]
    assert "fill (x_ptr) writes in torch.cuda.default_stream()" in wait.detail
    assert "missing: side.wait_stream(torch.cuda.default_stream())" in wait.detail
    [mapped] = [f for f in report.findings if f.argument == "factor"]
    assert "weigh (factor_ptr) reads in torch.cuda.default_stream()" in mapped.detail
    assert "missing: torch.cuda.default_stream().synchronize()" in mapped.detail
