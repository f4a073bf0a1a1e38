"""The source distribution is the whole project: its own tests can run from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from repository import ROOT


def test_all_files_of_the_project_are_in_it(tmp_path: Path) -> None:
    copy = tmp_path / "project"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "-c", "import setuptools.build_meta as b; b.build_sdist('dist')"],
        cwd=copy, check=True, capture_output=True, timeout=250,
    )  # fmt: skip
    [made] = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(made) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in tracked if name not in held and not name.startswith(".git")]
    assert missing == []
