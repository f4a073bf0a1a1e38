"""The benchmark against llama.cpp runs through with the real thing, on a model of a megabyte."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from peer.comparison import Peer

TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K_M")


@pytest.fixture(scope="module")
def report_of(peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The result for one file type; each is measured once."""
    folder = tmp_path_factory.mktemp("benchmark")

    @functools.cache
    def report(kind: str) -> Any:
        out = folder / f"{kind}.json"
        done = subprocess.run(
            [sys.executable, ROOT / "benchmarks/vs_llama_cpp.py", "--peer", peer.python, "--shape",
             "toy", "--types", kind, "--models", folder, "--out", out, "--depth", "100",
             "--rounds", "2", "--pairs", "1", "--prompt", "64", "--generate", "8",
             "--threads", "1"],
            capture_output=True, text=True, timeout=110,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    return report


@pytest.mark.parametrize("kind", TYPES)
def test_speeds_and_divergence_of_both(kind: str, report_of: Callable[[str], Any]) -> None:
    (row,) = report_of(kind)["types"]
    assert row["type"] == kind
    assert list(row["tests"]) == ["tg8", "tg8 @ d100", "pp64"]
    for test, engines in row["tests"].items():
        for runs in engines.values():
            assert len(runs) == 2
            assert all(run["tokens_per_second"] > 0 for run in runs)
            assert all((run["bandwidth_before"] is None) == (test == "pp64") for run in runs)
    assert row["bandwidth_shares"]["tg8"].keys() == {"ours", "peer"}
    ours, theirs = row["divergence"]["ours"], row["divergence"]["peer"]
    # From the same file: neither may be far from what quantising alone costs the other.
    assert 0 < ours["kl"] < 1.2 * theirs["kl"]
    assert any("Flash Attention" in note for note in row["engines"]["peer"]["notes"])


@pytest.mark.parametrize("shape", ["toy-qwen3moe", "toy-gpt-oss"])
def test_mixtures_of_experts_are_measured(shape: str, peer: Peer, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/vs_llama_cpp.py", "--peer", peer.python, "--shape",
         shape, "--models", tmp_path, "--out", out, "--depth", "100", "--rounds", "1", "--pairs",
         "1", "--prompt", "64", "--generate", "8", "--threads", "1"],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["types"]
    assert row["has_experts"]
    assert list(row["tests"]) == ["tg8", "tg8 @ d100", "pp64"]
    for engines in row["tests"].values():
        assert all(runs[0]["tokens_per_second"] > 0 for runs in engines.values())


def test_divergence_grows_as_the_types_shrink(report_of: Callable[[str], Any]) -> None:
    costs = {kind: report_of(kind)["types"][0]["divergence"]["peer"]["kl"] for kind in TYPES}
    assert costs["F16"] < 1e-5 < costs["Q8_0"] < 0.01 < costs["Q4_K_M"] < costs["Q4_0"]


def test_the_folder_is_named_nowhere(report_of: Callable[[str], Any]) -> None:
    assert str(Path.home()) not in json.dumps(report_of(TYPES[0]))
