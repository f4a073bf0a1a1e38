"""The benchmark against llama.cpp runs through with the real thing, on a model of a megabyte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peer.comparison import ROOT, Peer

TYPES = ("F16", "Q8_0", "Q4_0", "Q4_K_M")


@pytest.fixture(scope="module")
def report(peer: Peer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("benchmark")
    out = folder / "result.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/vs_llama_cpp.py", "--peer", peer.python, "--shape",
         "toy", "--models", folder, "--out", out, "--depth", "100", "--repetitions", "2",
         "--prompt", "64", "--generate", "8", "--threads", "1"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", TYPES)
def test_speeds_and_divergence_of_both(kind: str, report: Any) -> None:
    (row,) = [one for one in report["types"] if one["type"] == kind]
    assert list(row["tests"]) == ["tg8", "tg8 @ d100", "pp64"]
    for speeds in row["tests"].values():
        assert all(len(speeds[engine]) == 2 and min(speeds[engine]) > 0 for engine in speeds)
    ours, theirs = row["divergence"]["ours"], row["divergence"]["peer"]
    # From the same file: neither may be far from what quantising alone costs the other.
    assert 0 < ours["kl"] < 1.2 * theirs["kl"]
    assert any("Flash Attention" in note for note in row["engines"]["peer"]["notes"])


def test_divergence_grows_as_the_types_shrink(report: Any) -> None:
    rows = report["types"]
    costs = {row["type"]: row["divergence"]["peer"]["kl"] for row in rows}
    assert costs["F16"] < 1e-5 < costs["Q8_0"] < 0.01 < costs["Q4_K_M"] < costs["Q4_0"]


def test_the_folder_is_named_nowhere(report: Any) -> None:
    assert str(Path.home()) not in json.dumps(report)
