"""Which planted faults other tools report: torch's sanitizer of streams, Triton's check for
integers that overflow, and NVIDIA's memcheck.

    python benchmarks/vs_sanitizers.py OUT.json [--tools torch,triton,memcheck] [--jobs 12]

Each program of `faults/programs` that runs on a card runs once below each tool, without the doctor;
with `--text` only those in whose text that is found. A report counts whatever it names. What had no
time to end is null. What OUT.json has already stays.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from faults.program import FOLDER, Program, programs  # noqa: E402
from faults.report import environment_of  # noqa: E402
from faults.row import Platform  # noqa: E402


class Tool(NamedTuple):
    """What switches it on, and by what its report is known."""

    variables: Mapping[str, str]
    reports: str
    command: tuple[str, ...] = ()


TOOLS = {
    # torch/cuda/_sanitizer.py
    "torch": Tool({"TORCH_CUDA_SANITIZER": "1"}, r"CSAN detected"),
    # triton/language/semantic.py, with `sanitize_overflow`
    "triton": Tool({"TRITON_DEBUG": "1"}, r"overflow detected for operation"),
    "memcheck": Tool(
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, r"ERROR SUMMARY: [1-9]", ("compute-sanitizer",)
    ),
}


def reported(program: Program, name: str, seconds: float) -> bool | None:
    """Whether a tool reports anything of a program; None where that took too long."""
    tool = TOOLS[name]
    beside = [FOLDER / program.beside] if program.beside else []
    with tempfile.TemporaryDirectory() as folder:
        command = [*tool.command, *program.command(Path(folder))]
        try:
            done = subprocess.run(
                command, env={**environment_of(*beside), **tool.variables}, cwd=folder,
                capture_output=True, text=True, errors="replace", timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
    return bool(re.search(tool.reports, done.stdout + done.stderr))


def main() -> None:
    """See the module."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--text", default="", help="a regular expression")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a run")
    asked = parser.parse_args()
    cases = [
        one
        for one in programs()
        if Platform.CARD in one.platforms and not one.is_healthy and re.search(asked.text, one.text)
    ]
    found: dict[str, dict[str, bool | None]] = {}
    if asked.out.exists():
        found = json.loads(asked.out.read_text())["reported"]
    with ThreadPoolExecutor(asked.jobs) as pool:
        for tool in asked.tools.split(","):
            results = pool.map(partial(reported, name=tool, seconds=asked.seconds), cases)
            for one, result in zip(cases, results, strict=True):
                found.setdefault(one.name, {})[tool] = result
            told = [found[one.name][tool] for one in cases]
            print(f"{tool}: {told.count(True)} of {len(told)} reported, {told.count(None)} no time")
            asked.out.write_text(
                json.dumps({"device": torch.cuda.get_device_name(), "reported": found}, indent=1)
            )


if __name__ == "__main__":
    main()
