"""Programs with graphs on a real GPU, under `hypo doctor --suspect`: what it names, and alarms.

`python benchmarks/gpu_graphs.py` with the vendor's torch and Triton; under two minutes. It prints
a table. The programs know nothing of this package; what is right about each stands in `TRUTH`. What
a launch and a replay cost with and without the record, `foreign_cost.py` says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "benchmarks" / "gpu_programs"
MAX_SECONDS = 100


class Truth(NamedTuple):
    """`cause` is empty for a healthy program; `text` stands in the line that frees the memory.

    A runtime may take a kernel that is compiled during a capture: `may_run`.
    """

    cause: str = ""
    kernel: str = ""
    argument: str = ""
    text: str = ""
    may_run: bool = False


TRUTH = {
    "freed_graph_input": Truth("captured pointer freed", "scale", "x_ptr", "    del x"),
    "graph_input_reused": Truth("captured pointer freed", "scale", "x_ptr", "    del x"),
    "compiled_in_capture": Truth("call not allowed during capture", "scale", may_run=True),
    "graph_inputs_kept": Truth(),
    "compiled_graph": Truth(),
}


def main() -> None:
    work = Path(tempfile.mkdtemp(prefix="gpu-graphs-"))
    print("| program | cause | argument | freed at the right line | seconds | right |")
    print("|---|---|---|---|---:|---|")
    for name, truth in TRUTH.items():
        print(_row(name, truth, work))


def _row(name: str, truth: Truth, work: Path) -> str:
    program = PROGRAMS / f"{name}.py"
    begun = time.monotonic()
    command = [*_doctor(work / name), "--suspect", "--json", "--", sys.executable, str(program)]
    ran = _run(command, work)
    seconds = time.monotonic() - begun
    try:
        report: dict[str, Any] = json.loads(ran.stdout)
    except ValueError:
        return f"| {name} | {(ran.stderr.strip() or 'no report').splitlines()[-1]} | | | | no |"
    roots = report["roots"]
    root: dict[str, Any] = roots[0] if roots else {"cause": "", "kernel": "", "argument": ""}
    lines = program.read_text().splitlines()
    freed = [n for n, line in enumerate(lines, 1) if truth.text and line.startswith(truth.text)]
    place = (root.get("culprit") or {}).get("place", "")
    is_line = not freed or place.rpartition(":")[2] == str(freed[0])
    named = (root["cause"], root["kernel"] or "", root["argument"] or "")
    is_right = named == truth[:3] and is_line
    is_right = is_right or (truth.may_run and not roots)
    return (
        f"| {name} | {root['cause'] or 'nothing found'} | {root['argument'] or ''} | "
        f"{'yes' if freed and is_line else ''} | {seconds:.0f} | {'yes' if is_right else 'no'} |"
    )


def _doctor(bundle: Path) -> list[str]:
    return [sys.executable, "-m", "hypocenter", "doctor", "--out", str(bundle)]


def _run(command: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        command, cwd=work, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=MAX_SECONDS, check=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
