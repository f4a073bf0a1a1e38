"""Every test is in one tier, and `scripts/test-all` runs them all; planted ones in none or two."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from repository import ROOT
from tiers import TIERS, NoSingleTier, Tier, empty_grids, tier_of_case, tier_of_folder

TESTS = ROOT / "tests"
SCRIPTS = ROOT / "scripts"


def homeless(root: Path, tiers: Mapping[str, Tier] = TIERS) -> Iterator[str]:
    """Test files that no tier holds, or more than one."""
    for path in sorted(root.rglob("test_*.py")):
        try:
            tier_of_folder(path.relative_to(root).as_posix(), tiers)
        except NoSingleTier as error:
            yield str(error)


def unrun(scripts: Path, tiers: Mapping[str, Tier] = TIERS) -> Iterator[str]:
    """Tiers whose script is not there, is not run by test-all, or runs something else."""
    everything = (scripts / "test-all").read_text()
    for name, tier in tiers.items():
        path = scripts / tier.script
        if not os.access(path, os.X_OK):
            yield f"{name}: there is no {path.name}"
            continue
        if not re.search(rf"(?<![\w-]){re.escape(tier.script)}(?![\w-])", everything):
            yield f"{name}: test-all does not run {tier.script}"
        text = path.read_text()
        by_name = re.search(rf"--tier=\S*\b{name}\b", text)
        if tier.folders and not by_name and not all(f"tests/{one}" in text for one in tier.folders):
            yield f"{name}: {tier.script} does not run it"


def test_every_test_file_belongs_to_exactly_one_tier() -> None:
    assert list(homeless(TESTS)) == []
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert {folder for tier in TIERS.values() for folder in tier.folders} == folders


def test_every_tier_has_a_script_that_test_all_runs() -> None:
    assert list(unrun(SCRIPTS)) == []


def test_a_file_in_no_tier_and_one_in_two_are_found(tmp_path: Path) -> None:
    for name in ("house/test_a.py", "cellar/test_b.py", "test_c.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert [said.split(":")[0] for said in homeless(tmp_path)] == [
        "tests/cellar/test_b.py", "tests/test_c.py",
    ]  # fmt: skip
    twice = {**TIERS, "tools": replace(TIERS["tools"], folders=("tools", "house"))}
    (said,) = [one for one in homeless(tmp_path, twice) if "test_a" in one]
    assert "in the tiers ['fast', 'tools'], but must be in one" in said


def test_a_script_that_is_missing_or_not_run_is_found(tmp_path: Path) -> None:
    tiers = {
        "fast": Tier("test", ("house",), ""),
        "sim": Tier("test-sim", (), ""),
        "tools": Tier("test-tools", ("tools",), ""),
        "paths": Tier("test-paths", ("paths",), ""),
    }
    texts = {
        "test": "pytest --tier=fast", "test-sim": "", "test-paths": "pytest tests/elsewhere",
        "test-all": "for tier in test test-simple test-paths",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    assert list(unrun(tmp_path, tiers)) == [
        "sim: test-all does not run test-sim", "tools: there is no test-tools",
        "paths: test-paths does not run it",
    ]  # fmt: skip


def test_a_mark_moves_a_test_or_the_cases_that_it_refuses() -> None:
    def small(case: SimpleNamespace) -> bool:
        return bool(case.size < 3)

    file = "kernels/test_a.py"
    assert tier_of_case(file, [], {"size": 9}) == "fast"
    assert tier_of_case(file, [("sim", None)], {}) == "sim"
    assert tier_of_case(file, [("sim", small)], {"size": 2}) == "fast"
    assert tier_of_case(file, [("sim", small)], {"size": 3}) == "sim"
    with pytest.raises(NoSingleTier, match="there is no tier 'slow'"):
        tier_of_case(file, [("slow", None)], {})
    with pytest.raises(NoSingleTier, match=r"in the tiers \['sim', 'targets'\]"):
        tier_of_case(file, [("sim", small), ("targets", None)], {"size": 3})


def test_a_grid_that_leaves_nothing_in_the_fast_tier_is_found() -> None:
    found = [("test_a", "fast"), ("test_a", "sim"), ("test_b", "sim"), ("test_b", "sim")]
    assert empty_grids(found) == {"test_b"}
