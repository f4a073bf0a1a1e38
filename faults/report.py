"""Runs a program below `hypo doctor`, and reads the report that it writes as JSON."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from faults.judge import CLAIMS, Root

ROOT = Path(__file__).resolve().parents[1]
MAX_SECONDS = 300
#: Where `faults` and `hypocenter` are found.
_PATHS = (ROOT, ROOT / "src")
_KEYS = (*CLAIMS, "tensor", "file", "culprit", "sentence", "edits", "alternatives")


def module_command(module: str) -> list[str]:
    """The command line that runs a module of this folder, in an environment of `environment_of`."""
    return [sys.executable, "-P", "-m", module]


def environment_of(*first: Path) -> dict[str, str]:
    """That of this process, in which Python finds what is in `first`, then what is here."""
    paths = [*map(str, (*first, *_PATHS)), *filter(None, (os.environ.get("PYTHONPATH"),))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_doctor(
    program: list[str], folder: Path, options: Iterable[str], environment: Mapping[str, str]
) -> tuple[int | None, str, str]:
    """Exit code (None: it took too long), report and stderr of a program below `hypo doctor`.

    They are left in the folder, beside the bundle.
    """
    command = [sys.executable, "-m", "hypocenter", "doctor", "--json", *options]
    command += ["--out", str(folder / "bundle"), "--", *program]
    exit_code, report, stderr = None, "", "it took too long"
    with suppress(subprocess.TimeoutExpired):
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True,
            timeout=MAX_SECONDS, check=False,
        )  # fmt: skip
        exit_code, report, stderr = ran.returncode, ran.stdout, ran.stderr
    (folder / "stderr.txt").write_text(stderr)
    (folder / "report.json").write_text(report)
    return exit_code, report, stderr


def json_of(text: str) -> dict[str, Any] | None:
    """The report in what a command wrote; None where there is none."""
    with suppress(ValueError):
        last = text.rstrip().rfind("\n{")
        found = json.loads(text[last + 1 :] if last >= 0 else text[text.find("{") :])
        return found if isinstance(found, dict) else None
    return None


def roots_of(text: str) -> list[Root] | None:
    """The causes of a report; None where there is no report."""
    report = json_of(text)
    if report is None or "roots" not in report:
        return None
    return [told_of(root) for root in report["roots"]]


def told_of(root: Root) -> Root:
    """What of a cause is judged and kept."""
    return {key: root.get(key) for key in _KEYS}


def files_of(roots: Iterable[Root]) -> set[Path]:
    """Files whose lines causes name."""
    culprits = (str((root.get("culprit") or {}).get("place") or "") for root in roots)
    named = {place.rpartition(":")[0] for place in culprits} | {root.get("file") for root in roots}
    return {Path(name) for name in named if name}


def lost_of(text: str) -> list[str]:
    """Launches that could not be recorded, as a report says: how many of which kernel, and why."""
    gaps = (json_of(text) or {}).get("unseen", ())
    lost = [gap for gap in gaps if gap["kind"] == "launch not recorded"]
    return [f"{gap['what']}: {gap['reason']}" for gap in lost]


def with_edits(file: Path, edits: Iterable[Mapping[str, Any]]) -> str | None:
    """A program's text with a fix in it; None where that is no change of this text."""
    lines = file.read_text().splitlines(keepends=True)
    is_changed = False
    for edit in edits:
        is_here = Path(edit["file"]).name == file.name and 0 < edit["line"] <= len(lines)
        if edit.get("name") or not is_here or lines[edit["line"] - 1].strip() != edit["old"]:
            return None
        lines[edit["line"] - 1] = lines[edit["line"] - 1].replace(edit["old"], edit["new"])
        is_changed = True
    return "".join(lines) if is_changed else None


def means_the_same(one: str, other: str) -> bool:
    """Whether two texts of Python differ in comments and spaces at most."""
    return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


def without_folder(roots: Sequence[Root] | None, folder: Path) -> list[Root] | None:
    """Causes whose files are named from the folder of a run on, which is another in each."""
    if roots is None:
        return None
    found: list[Root] = json.loads(json.dumps(roots).replace(f"{folder}/", ""))
    return found
