"""benchmarks/vs_llama_cpp.py --device without a card: ours on the CPU beside a pretended peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from repository import ROOT

SCRIPT = ROOT / "benchmarks/vs_llama_cpp.py"
ASKED = (
    "--device", "cpu", "--shape", "toy", "--prompt", "16", "--generate", "2", "--depth", "0", "8",
    "--batches", "2", "16", "--repetitions", "2", "--rounds", "2",
)  # fmt: skip

#: As llama-bench answers, at 100 tokens per second in prompts and 10 in decode.
LLAMA_BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-fa"] == "1" and given["-ngl"] == "99", given
again, tests = int(given["-r"]), []
for depth in map(int, given.get("-d", "0").split(",")):
    for num in map(int, given["-p"].split(",")):
        tests.append(dict(n_prompt=num, n_gen=0, n_depth=depth, samples_ts=[100.0] * again))
    num = int(given["-n"])
    tests.append(dict(n_prompt=0, n_gen=num, n_depth=depth, samples_ts=[10.0] * again))
print(json.dumps(tests))
"""
BATCHED_BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert int(given["-c"]) == 16 * (16 + 2), given
print("main: a remark")
for num in map(int, given["-npl"].split(",")):
    print(json.dumps(dict(pl=num, speed_tg=10.0 * num)))
"""


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = {"llama-bench": LLAMA_BENCH, "llama-batched-bench": BATCHED_BENCH}
    for name, text in texts.items():
        (folder / name).write_text(text.replace("{python}", sys.executable))
        (folder / name).chmod(0o755)
    return folder


def _run(tmp_path: Path, peer: Path, *more: str) -> subprocess.CompletedProcess[str]:
    models, out = str(tmp_path / "models"), str(tmp_path / "report.json")
    return subprocess.run(
        [sys.executable, SCRIPT, *ASKED, "--peer", peer, "--models", models, "--out", out, *more],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_both_are_measured_by_turns_and_compared(tmp_path: Path, peer: Path) -> None:
    done = _run(tmp_path, peer, "--types", "Q4_K_M")
    assert done.returncode == 0, done.stderr
    turns = [line.rsplit(", ", 1)[1] for line in done.stderr.splitlines() if "round" in line]
    assert turns == ["ours", "peer", "peer", "ours"]
    [row] = json.loads((tmp_path / "report.json").read_text())["types"]
    tests = ["pp16", "tg2", "pp16 @ d8", "tg2 @ d8", "batch of 2", "batch of 16"]
    assert list(row["speeds"]["ours"]) == list(row["speeds"]["peer"]) == tests
    assert [len(row["speeds"]["ours"][test]) for test in tests] == [4] * 6
    assert row["speeds"]["peer"]["batch of 16"] == [160.0, 160.0]
    assert row["start"]["ours"]["seconds"] > row["start"]["peer"]["seconds"] > 0
    ours = row["speeds"]["ours"]["batch of 16"]
    halves = [(ours[0] + ours[1]) / 320, (ours[2] + ours[3]) / 320]
    told = f"{np.median(halves):.2f} ({min(halves):.2f}..{max(halves):.2f})"
    [line] = [line for line in done.stdout.splitlines() if "batch of 16 " in line]
    assert told in line
    assert "Q4_K_M: batch of 16: x llama.cpp" in done.stdout


def test_tensors_have_the_types_that_a_quantiser_gives_them(tmp_path: Path, peer: Path) -> None:
    assert _run(tmp_path, peer, "--types", "Q4_K_M", "--rounds", "1").returncode == 0
    [path] = (tmp_path / "models").iterdir()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert kinds["output.weight"] == "Q6_K"
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == "Q4_K"
    # Two layers: an eighth of them is none, so both are the last seven eighths'.
    assert kinds["blk.1.ffn_down.weight"] == kinds["blk.1.attn_v.weight"] == "Q6_K"
    gate = tensors["blk.0.ffn_gate.weight"]
    values = gguf.quants.dequantize(gate.data, gate.tensor_type)
    assert values.shape == (512, 256)
    assert np.std(values) == pytest.approx(256**-0.5, rel=0.1)


def test_mixtures_of_experts_run_cut_to_some_layers(tmp_path: Path, peer: Path) -> None:
    done = _run(tmp_path, peer, "--shape", "toy-gpt-oss", "--layers", "1", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["shape"]["name"], report["shape"]["num_layers"]) == ("toy-gpt-oss-1-layers", 1)
    [row] = report["types"]
    assert (row["type"], row["has_experts"]) == ("MXFP4_MOE", True)
    assert row["speeds"]["ours"]["tg2"][0] > 0


def test_a_peer_that_fails_ends_the_run_with_its_last_line(tmp_path: Path, peer: Path) -> None:
    (peer / "llama-bench").write_text("#!/bin/sh\necho no device >&2\nexit 3\n")
    done = _run(tmp_path, peer, "--types", "Q8_0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(": no device")
    assert not (tmp_path / "report.json").exists()


def test_a_folder_without_the_peer_is_refused(tmp_path: Path) -> None:
    done = _run(tmp_path, tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("holds no llama-bench that runs")
