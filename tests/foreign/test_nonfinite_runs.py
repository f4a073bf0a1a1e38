"""`hypo doctor --nan -- COMMAND` and `--again`, from the command to the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hypocenter.cli import app

pytest.importorskip("triton")

#: Row 2 has no key that is not masked, where `length` is 0.
PROGRAM = """
import sys, torch, triton, triton.language as tl
@triton.jit
def masked_softmax(s_ptr, len_ptr, p_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0); i = tl.arange(0, BLOCK)
    length = tl.load(len_ptr + row)
    s = tl.load(s_ptr + row * n + i, mask=i < n, other=float("-inf"))
    s = tl.where(i < length, s, float("-inf"))
    e = tl.exp(s - tl.max(s, axis=0))
    tl.store(p_ptr + row * n + i, e / tl.sum(e, axis=0), mask=i < n)
s, lengths = torch.ones(4, 10), torch.full((4,), 7, dtype=torch.int32)
lengths[2] = int(sys.argv[1])
p = torch.empty_like(s)
masked_softmax[(4,)](s, lengths, p, 10, BLOCK=16)
loss = (p @ torch.ones(10, 3)).square().mean()
assert not torch.isnan(loss), "loss is NaN"
"""


def report(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    option: str,
    length: str,
) -> tuple[object, dict[str, Any], str]:
    """Exit code, the report, and stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (folder / "program.py").write_text(PROGRAM)
    capfd.readouterr()
    code: object = 0
    try:
        app.main(["doctor", option, "--json", "--", sys.executable, "program.py", length])
    except SystemExit as left:
        code = left.code
    out, err = capfd.readouterr()
    return code, json.loads(out), err


@pytest.mark.parametrize("option", ["--nan", "--again", "--suspect"])
@pytest.mark.tier("sim", fast=lambda case: case.option == "--nan")  # ways: `test_again.py`
def test_the_lane_of_a_kernel_is_named_that_made_it(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    option: str,
) -> None:
    code, told, err = report(capfd, monkeypatch, tmp_path, option, "0")
    assert code == 3
    root = told["roots"][0]
    assert (root["cause"], root["kernel"]) == ("non-finite value", "masked_softmax")
    assert (root["argument"], root["tensor"], root["line"]) == ("p_ptr", "p", 9)
    assert root["expression"] == "s - tl.max(s, axis=0)"
    assert "program (2, 0, 0)" in root["sentence"]
    assert "every entry of a row is masked" in root["sentence"]
    assert "stores 0.0625 there" in root["proof"]["green"]  # of 16 lanes each has a share
    assert ("run 2, with an eye on its numbers" in err) == (option == "--again")


def test_a_mask_that_leaves_a_key_is_no_cause(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, told, _ = report(capfd, monkeypatch, tmp_path, "--nan", "3")
    assert code == 0
    assert told["roots"] == []
    verdicts = {row["cause"]: row["verdict"] for row in told["hypotheses"]}
    assert verdicts["non-finite value"] == "REFUTED"


def test_without_the_option_the_report_says_how_to_find_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch_only.py").write_text(
        "import torch\nx = torch.zeros(1).log() * 0\nassert not x.isnan().any()\n"
    )
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    with pytest.raises(SystemExit) as left:
        app.main(["doctor", "--json", "--", sys.executable, "torch_only.py"])
    told = json.loads(capfd.readouterr().out)
    assert left.value.code == 3
    row = next(row for row in told["hypotheses"] if row["cause"] == "non-finite value")
    assert row["verdict"] == "INCONCLUSIVE"
    assert "hypo doctor --nan" in row["evidence"][0]
