"""Python files of the current folder never run: it may hold a model of somebody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from outside.terminal import TIMEOUT_SECONDS
from repository import ROOT

#: What commands import, early and late, of ours, of others and of Python itself.
PLANTED = ("hypocenter", "numpy", "numba", "llvmlite", "torch", "triton", "msgspec", "json", "gguf")
#: The console script, as a user has it: Python puts its folder, not the current one, on the path.
HYPO = Path(sys.executable).parent / "hypo"
_EXAMPLE = str(ROOT / "examples" / "missing_mask.py")


@pytest.mark.parametrize(
    "command",
    [
        ["env"],
        ["inspect"],
        ["run", "-p", "x", "-n", "1"],
        ["doctor", "--", "run", "-p", "x", "-n", "1"],
        ["check", _EXAMPLE],
        ["kernels", _EXAMPLE, "--arch", "sm_90"],
        ["demo"],
    ],
    ids=" ".join,
)
@pytest.mark.tier("sim", fast=lambda case: case.command[0] == "doctor")
def test_no_file_of_the_current_folder_runs(tmp_path: Path, command: list[str]) -> None:
    ran = tmp_path / "ran"
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in PLANTED:
        code = f"open({str(ran)!r}, 'a').write('{name} ')\nraise ImportError('of this folder')\n"
        (folder / f"{name}.py").write_text(code)
    done = subprocess.run(
        [str(HYPO), *command],
        cwd=folder, env={**os.environ, "HYPO_RUN_DIR": str(tmp_path / "runs")},
        capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert not ran.exists(), f"{ran.read_text()}ran: {done.stderr}"
    assert "of this folder" not in done.stderr + done.stdout
    assert done.returncode in (0, 1, 4, 134), done.stderr
