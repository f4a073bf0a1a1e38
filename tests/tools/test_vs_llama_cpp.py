"""benchmarks/vs_llama_cpp.py without llama.cpp: what it refuses, its turns, figures and models."""

from __future__ import annotations

import importlib
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from models.demo_variants import demo_with
from repository import DEMO, ROOT

from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.text.tokenizer import load_tokenizer

BENCHMARKS = ROOT / "benchmarks"
ARGUMENTS = (
    "--shape", "toy", "--types", "Q8_0", "--threads", "1", "--prompt", "20", "--generate", "4",
    "--depth", "8", "--rounds", "3", "--pairs", "1",
)  # fmt: skip

#: A worker that is as fast as it is told, and reports what it was asked for unless told to lie.
#: Each reading finds memory faster than the one before.
FAKE_WORKER = """
import itertools, json, os, sys, threading, time
sys.path.insert(0, os.environ["BENCHMARKS"])
import numpy as np
from vs_protocol import serve

NAME = os.path.basename(__file__)[:-3]
LIES = json.loads(os.environ["LIES"]).get(NAME, {})
SPEED = {"ours": 300.0, "peer": 200.0}[NAME]
asked, readings = {}, itertools.count(1)

def note(*words):
    with open(os.environ["DIARY"], "a", buffering=1) as diary:
        print(*words, file=diary)

def spin():
    end = time.perf_counter() + LIES["spin"]
    with open(os.environ["DIARY"], "a", buffering=1) as diary:
        while time.perf_counter() < end:
            pass
        print(NAME, "rests", file=diary)

def facts():
    told = {"engine": NAME, "instructions": "none", "file_type": "Q8_0", **asked}
    if NAME == "ours":
        told["main_dtype"] = "Q8_0"
    return told | LIES.get("facts", {})

def load(path, is_reference=False, **arguments):
    asked.update(arguments)
    return facts() | ({"file_type": "F32"} if is_reference else {})

def run(tokens, depth=0, num_warm=0):
    note(NAME, len(tokens), depth, sum(tokens))
    if num_warm != (8 if len(tokens) == 4 else 0):
        raise ValueError(f"{num_warm} tokens that do not count")
    if "spin" in LIES:
        threading.Thread(target=spin).start()
    took = {"num_tokens": len(tokens), "seconds": len(tokens) / SPEED}
    return took | {"num_threads": asked["num_threads"]} | LIES.get("run", {})

def logits(tokens, out):
    np.save(out, np.random.default_rng(0).standard_normal((len(tokens), 50), np.float32))
    return {"num_tokens": len(tokens), "num_threads": asked["num_threads"]}

def memory():
    return {"peak_bytes": 1 << 28, "anonymous_bytes": 1 << 20, "mapped_file_bytes": 0}

def bandwidth(num_threads):
    note("reads", num_threads)
    number = next(readings)
    return {"sustained": 1e9 * (number not in LIES.get("slow", ())) * number, "best": 1e12}

serve({"load": load, "facts": facts, "prefill": run, "decode": run, "logits": logits,
       "memory": memory, "bandwidth": bandwidth})
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of `benchmarks/` by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def models(module: Any) -> Any:
    return module("vs_models")


class Rig:
    """The benchmark with fake workers."""

    def __init__(self, benchmark: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.benchmark, self.folder, self.patch = benchmark, folder, monkeypatch
        self.out, self.diary = folder / "result.json", folder / "diary"
        for name in ("ours", "peer"):
            (folder / f"{name}.py").write_text(FAKE_WORKER)
        facts = benchmark.file_facts
        scripts = {name: folder / f"{name}.py" for name in ("ours", "peer")}
        monkeypatch.setattr(benchmark, "SCRIPTS", scripts)
        monkeypatch.setattr(benchmark, "_peer_version", lambda peer: "0")
        monkeypatch.setattr(benchmark, "quantised", lambda source, *rest: source.with_suffix(".q"))
        monkeypatch.setattr(benchmark, "file_facts", lambda path: self.facts(path, facts))
        monkeypatch.setenv("BENCHMARKS", str(BENCHMARKS))
        monkeypatch.setenv("DIARY", str(self.diary))

    def facts(self, path: Path, real: Any) -> Any:
        if path.suffix == ".gguf":
            return real(path)
        return replace(real(path.with_suffix(".gguf")), file_type="Q8_0", main_dtype="Q8_0")

    def run(self, lies: Mapping[str, Any], *more: str) -> int:
        self.patch.setenv("LIES", json.dumps(lies))
        arguments = ["--peer", sys.executable, "--models", str(self.folder / "models")]
        given = ["vs_llama_cpp.py", *arguments, "--out", str(self.out), *ARGUMENTS, *more]
        self.patch.setattr(sys, "argv", given)
        return int(self.benchmark.main())

    def events(self) -> list[list[str]]:
        """What the workers did, in order: their runs, ends of spinning, readings of memory."""
        return [line.split() for line in self.diary.read_text().splitlines()]


@pytest.fixture
def rig(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(module("vs_llama_cpp"), tmp_path, monkeypatch)


def told_apart(runs: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Runs, and those of ours at depth 0 that follow one at a depth."""
    is_beside = [at > 0 and runs[at - 1][:3] == ["ours", "4", "8"] for at in range(len(runs))]
    return tuple(
        [run for run, found in zip(runs, is_beside, strict=True) if found == wanted]
        for wanted in (False, True)
    )  # type: ignore[return-value]


def test_both_take_turns_on_equal_tokens_and_the_first_round_does_not_count(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rig.run({}) == 0
    runs, _ = told_apart([event for event in rig.events() if event[0] != "reads"])
    pair = {"ours", "peer"}
    shallow, fill, deep, prompt = ["4", "0"], ["8", "0"], ["4", "8"], ["20", "0"]
    in_order = [shallow, shallow, fill, fill, deep, deep] * 4 + [prompt] * 8
    assert [run[1:3] for run in runs] == in_order, "the depths of a round lie apart"
    for test in (shallow, fill, deep, prompt):
        of_test = [run for run in runs if run[1:3] == test]
        rounds = [of_test[at : at + 2] for at in range(0, 8, 2)]
        assert all({run[0] for run in one} == pair for one in rounds)
        assert all(one[0][3] == one[1][3] for one in rounds), "the two got other tokens"
        leaders = [one[0][0] for one in rounds]
        assert leaders[0] != leaders[1] != leaders[2] != leaders[3], "the order does not alternate"
    (row,) = json.loads(rig.out.read_text())["types"]
    assert list(row["tests"]) == ["tg4", "tg4 @ d8", "pp20"]
    for runs_of in row["tests"].values():
        for name, speed in (("ours", 300.0), ("peer", 200.0)):
            assert [one["tokens_per_second"] for one in runs_of[name]] == pytest.approx([speed] * 3)
    printed = capsys.readouterr().out
    assert "1.50 (1.50..1.50)" in printed
    assert "Q8_0: tg4: x llama.cpp 1.5 >= 1.05: met" in printed
    assert str(rig.folder) not in rig.out.read_text(), "the result names a folder of this machine"


def test_a_filled_cache_serves_several_pairs_of_decodes(rig: Rig) -> None:
    assert rig.run({}, "--no-divergence", "--rounds", "1", "--pairs", "3") == 0
    events, _ = told_apart([event for event in rig.events() if event[0] != "reads"])
    prefills = [event[1:3] for event in events if event[1] == "8"]
    assert prefills == [["8", "0"]] * 4, "two engines, and a round that warms up"
    for depth in ("0", "8"):
        decodes = [event for event in events if event[1:3] == ["4", depth]][2:]
        pairs = [decodes[at : at + 2] for at in range(0, 6, 2)]
        assert len(decodes) == 6
        assert all(one[3] == other[3] for one, other in pairs), "the two got other tokens"
        assert len({one[3] for one, _ in pairs}) == 3
        leaders = [one[0] for one, _ in pairs]
        assert leaders[0] == leaders[2] != leaders[1]
    (row,) = json.loads(rig.out.read_text())["types"]
    assert [len(row["tests"][test]["ours"]) for test in ("tg4", "tg4 @ d8", "pp20")] == [3, 3, 1]
    for test, numbers in (("tg4", [3, 4, 5]), ("tg4 @ d8", [3, 4, 5]), ("pp20", [1])):
        for runs_of in row["tests"][test].values():
            assert [one["number"] for one in runs_of] == numbers, "a pair's runs go by its number"


def test_ours_decodes_at_depth_0_right_behind_each_decode_at_a_depth(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the depth costs is seen before memory changes its speed."""
    assert rig.run({}, "--no-divergence", "--rounds", "1", "--pairs", "3") == 0
    runs, beside = told_apart([event for event in rig.events() if event[0] != "reads"])
    deep = [run for run in runs if run[:3] == ["ours", "4", "8"]]
    assert [run[:3] for run in beside] == [["ours", "4", "0"]] * 4
    assert [run[3] for run in beside] == [run[3] for run in deep], "other tokens"
    (row,) = json.loads(rig.out.read_text())["types"]
    assert len(row["tests"]["tg4 @ d8"]["ours at depth 0"]) == 3
    assert "tg4 @ d8: of the speed at depth 0 1 >= 0.85: met" in capsys.readouterr().out


def test_memory_is_read_right_before_and_right_after_each_decode(rig: Rig) -> None:
    assert rig.run({}, "--no-divergence") == 0
    report = json.loads(rig.out.read_text())
    (row,) = report["types"]
    events = rig.events()
    decodes = [at for at, event in enumerate(events) if event[1] == "4"]
    expected = []
    for at in decodes[5:]:  # the first round warms up
        assert events[at - 1] == events[at + 1] == ["reads", "1"]
        num_before = sum(event[0] == "reads" for event in events[:at])
        name, _, depth, _ = events[at]
        expected.append((depth, name, 1e9 * num_before, 1e9 * (num_before + 1)))
    told = [
        ("8" if "@" in test and name in ("ours", "peer") else "0", name.split()[0],
         one["bandwidth_before"], one["bandwidth_after"])
        for test in ("tg4", "tg4 @ d8") for name, runs in row["tests"][test].items()
        for one in runs
    ]  # fmt: skip
    assert sorted(told) == sorted(expected)
    assert [one["sustained"] for one in row["bandwidth"]] == [1e9 * (at + 1) for at in range(28)]
    assert report["bytes_per_second"] == 28e9, "the best of the run"
    assert row["bandwidth_shares"]["tg4"].keys() == {"ours", "peer"}


@pytest.mark.parametrize(
    ("slow", "counted"),
    [
        # The first seven readings are of the round that warms up.
        ([8, 10, 14], [[11, 12], [12, 13], [15, 16], [16, 17], [17, 18]]),
        ([10], [[11, 12], [12, 13], [14, 15], [15, 16], [16, 17]]),
    ],
    ids=["ahead and between", "behind one of the two"],
)
def test_a_pair_counts_only_where_memory_is_as_fast_as_asked_for(
    rig: Rig, capsys: pytest.CaptureFixture[str], slow: list[int], counted: list[list[int]]
) -> None:
    """A slow reading ahead of a pair is made again; with one beside a pair, both engines' runs."""
    lies = {"ours": {"slow": slow}}
    more = ("--no-divergence", "--rounds", "1", "--bandwidth", "5")
    assert rig.run(lies, *more) == 0
    (row,) = json.loads(rig.out.read_text())["types"]
    readings = {
        (test, name): [one["bandwidth_before"] / 1e9, one["bandwidth_after"] / 1e9]
        for test in ("tg4", "tg4 @ d8") for name, (one,) in row["tests"][test].items()
    }  # fmt: skip
    assert sorted(readings.values()) == counted
    assert row["num_pairs_left_out"] == 1
    assert "left out, since memory was slower: 1" in capsys.readouterr().out
    assert rig.run(lies, *more[:-2]) == 0
    assert "left out" not in capsys.readouterr().out


def test_memory_that_stays_slow_is_given_up(
    rig: Rig, module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module("vs_turns"), "PATIENCE_SECONDS", 0.1)
    assert rig.run({}, "--no-divergence", "--bandwidth", "1000000") == 0
    printed = capsys.readouterr().out
    for test in ("tg4", "tg4 @ d8"):
        assert f"Q8_0: WARNING: 0 of 3 pairs of {test} count" in printed
    assert "Q8_0: pp20: x llama.cpp 1.5 >= 1.5: met" in printed


def test_runs_and_readings_have_their_time_since_the_start(rig: Rig) -> None:
    assert rig.run({}, "--no-divergence") == 0
    (row,) = json.loads(rig.out.read_text())["types"]
    readings = [one["started_seconds"] for one in row["bandwidth"]]
    assert readings[0] > 0
    assert readings == sorted(readings)
    for test in ("tg4", "tg4 @ d8"):
        for one in (run for runs in row["tests"][test].values() for run in runs):
            at = int(one["bandwidth_before"] / 1e9)  # one-based, so also the index of the next
            assert readings[at - 1] < one["started_seconds"] < readings[at]
    for run in (run for runs in row["tests"]["pp20"].values() for run in runs):
        assert run["started_seconds"] > readings[-1]


def test_nothing_begins_while_the_threads_of_another_spin(rig: Rig) -> None:
    assert rig.run({"ours": {"spin": 0.03}, "peer": {"spin": 0.03}}, "--no-divergence") == 0
    events = rig.events()
    runs = [at for at, event in enumerate(events) if event[0] != "reads" and event[1] != "rests"]
    assert len(runs) == 36
    assert all(events[at + 1] == [events[at][0], "rests"] for at in runs)


@pytest.mark.parametrize(
    ("engine", "lie", "complaint"),
    [
        ("ours", {"facts": {"num_threads": 2}}, "num_threads 2, but 1"),
        ("peer", {"facts": {"num_threads": "1 and 2"}}, "num_threads 1 and 2, but 1"),
        ("peer", {"facts": {"file_type": "Q4_0"}}, "file_type Q4_0, but Q8_0"),
        ("ours", {"facts": {"main_dtype": "BF16"}}, "main_dtype BF16, but Q8_0"),
        ("peer", {"run": {"num_tokens": 3}}, "num_tokens 3, but 4"),
        ("ours", {"run": {"num_threads": 2}}, "num_threads 2, but 1"),
    ],
)
def test_nothing_is_compared_when_a_worker_did_something_else(
    rig: Rig, capsys: pytest.CaptureFixture[str], engine: str, lie: Any, complaint: str
) -> None:
    assert rig.run({engine: lie}, "--no-divergence") == 1
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert f"vs_llama_cpp: {engine} reports {complaint} was asked for" in last
    assert not captured.out
    assert not rig.out.exists()
    assert rig.diary.exists() == ("run" in lie), "it ran before it looked"


def test_every_fact_that_is_asked_for_is_held_against_the_report(module: Any, models: Any) -> None:
    turns = module("vs_turns")
    asked = turns.Asked(models.FileFacts("Q4_K_M", "Q4_K", 10, 8), 2, 2304, 512)
    honest = {
        "file_type": "Q4_K_M", "main_dtype": "Q4_K", "num_threads": 2, "context_length": 2304,
        "batch": 512, "kv_dtype": "f16", "float_products": "exact",
    }  # fmt: skip
    turns.require_load(asked, "ours", honest)
    for name in honest:
        with pytest.raises(models.BenchmarkError, match=f"ours reports {name} 7, but"):
            turns.require_load(asked, "ours", {**honest, name: 7})
        if name not in ("main_dtype", "float_products"):  # llama.cpp has nothing to tell of them
            without = {key: value for key, value in honest.items() if key != name}
            with pytest.raises(models.BenchmarkError, match=f"{name} None"):
                turns.require_load(asked, "peer", without)
    run = {"num_tokens": 512, "num_threads": 2}
    turns.require_run(asked, "peer", 512, run)
    for name in run:
        with pytest.raises(models.BenchmarkError, match=f"peer reports {name} 511"):
            turns.require_run(asked, "peer", 512, {**run, name: 511})


def test_a_depth_is_compared_with_what_ran_beside_it(module: Any) -> None:
    """Memory changes its speed between the tests of a round, by more than a depth costs."""
    report = module("vs_report")

    def runs(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_second": speed, "number": at} for at, speed in enumerate(speeds)]

    deep = {"ours": runs(45, 90), "ours" + report.BESIDE: runs(50, 100), "peer": runs(30, 30)}
    row = {"tests": {"tg32": {"ours": runs(100, 50), "peer": runs(60, 40)}, "tg32 @ d2000": deep}}
    assert report._kept(row, "ours", "tg32 @ d2000") == report.Ratio(0.9, 0.9, 0.9)
    assert report._kept(row, "peer", "tg32 @ d2000") == report.Ratio(0.625, 0.5, 0.75)
    assert report._kept(row, "ours", "tg32") is None
    assert report._kept(row, "nobody", "tg32 @ d2000") is None


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "required: --peer"),
        (["--peer", "/"], "is no interpreter"),
        (["--peer", sys.executable, "--types", "Q9"], "'Q9'"),
        (["--peer", sys.executable, "--threads", "0"], "0 is too few"),
        (["--peer", sys.executable, "--threads", "9999"], "9999"),
        (["--peer", sys.executable, "--depth", "-5"], "'-5' is not a number from 0 on"),
        (["--peer", sys.executable, "--depth", "9000"], "tinyllama-1.1b has 4096"),
        (["--peer", sys.executable, "--types", "MXFP4_MOE"], "has no file of type MXFP4_MOE"),
    ],
)
def test_wrong_arguments_are_told_in_a_line(
    module: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    benchmark = module("vs_llama_cpp")
    with pytest.raises(SystemExit) as caught:
        benchmark._options(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_a_python_without_llama_cpp_is_told_in_a_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "vs_llama_cpp.py", "--peer", sys.executable, "--models",
         tmp_path, "--shape", "toy"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "No module named 'llama_cpp'" in line


@pytest.mark.parametrize("name", ["toy", "toy-qwen3moe", "toy-gpt-oss"])
def test_our_worker_reports_what_the_runner_did(
    module: Any, models: Any, tmp_path: Path, name: str
) -> None:
    shape = models.SHAPES[name]
    path = (
        module("vs_blocks").made_of_blocks(shape, shape.usual_type, tmp_path)
        if shape.experts
        else models.original(shape, tmp_path)
    )
    turns, facts = module("vs_turns"), models.file_facts(path)
    asked = turns.Asked(facts, 1, 512, 64)
    tokens = turns.random_tokens(1024, 20)
    script = BENCHMARKS / "vs_worker.py"
    with module("vs_protocol").Worker("ours", Path(sys.executable), script) as worker:
        arguments = asked.load_arguments("ours")
        turns.require_load(asked, "ours", worker.ask("load", path=str(path), **arguments))
        turns.require_run(asked, "ours", 20, worker.ask("prefill", tokens=tokens))
        turns.require_run(asked, "ours", 4, worker.ask("decode", tokens=tokens[:4], depth=20))
        out = tmp_path / "logits.npy"
        turns.require_run(asked, "ours", 20, worker.ask("logits", tokens=tokens, out=str(out)))
        memory = worker.ask("memory")
        turns.require_load(asked, "ours", worker.ask("facts"))
    logits = np.load(out)
    assert logits.shape == (20, 1024)
    assert 2.0 < logits.std() < 4.0, "the model's distributions do not look real"
    assert memory["peak_bytes"] >= memory["anonymous_bytes"] > 1 << 20


def test_our_worker_multiplies_in_bf16_where_it_is_told_to(
    module: Any, models: Any, tmp_path: Path
) -> None:
    with open_gguf(DEMO) as file:
        matrices = [name for name, info in file.tensors.items() if len(info.shape) == 2]
    kinds = dict.fromkeys(matrices, GGMLQuantizationType.F16)
    path = demo_with(tmp_path / "f16.gguf", {}, kinds)
    turns, facts = module("vs_turns"), models.file_facts(path)
    script = BENCHMARKS / "vs_worker.py"
    with module("vs_protocol").Worker("ours", Path(sys.executable), script) as worker:
        for asked in (
            turns.Asked(facts, 1, 512, 64, float_products="bf16"), turns.Asked(facts, 1, 512, 64)
        ):  # fmt: skip
            told = worker.ask("load", path=str(path), **asked.load_arguments("ours"))
            turns.require_load(asked, "ours", told)
    assert (told["main_dtype"], told["float_products"]) == ("F16", "exact")


def test_products_in_bf16_are_listed_apart_and_have_no_targets(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = {"ours": {"facts": {"main_dtype": "BF16"}}}
    assert rig.run(honest, "--types", "F16-bf16") == 0
    (row,) = json.loads(rig.out.read_text())["types"]
    assert (row["type"], row["targets"]) == ("F16-bf16", [])
    assert row["engines"]["ours"]["float_products"] == "bf16"
    assert "float_products" not in row["engines"]["peer"]
    assert row["divergence"]["ours"]["kl"] >= 0
    shown = capsys.readouterr().out
    assert re.search(r"^\| F16-bf16 \| pp20 ", shown, re.MULTILINE)
    assert "met" not in shown.lower()
    assert "MISSED" not in shown
    exact = {"ours": {"facts": {"main_dtype": "BF16", "float_products": "exact"}}}
    assert rig.run(exact, "--types", "F16-bf16") == 1
    assert "float_products exact, but bf16" in capsys.readouterr().err


def test_bandwidth_counts_every_byte_once(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = module("vs_worker")
    monkeypatch.setattr(worker, "NUM_READ_PASSES", 2)
    monkeypatch.setattr(worker, "READ_BYTES", 1 << 24)
    values = np.arange(2 * worker.NUM_STREAMS * 64 * 3, dtype=np.float32)
    sums = np.zeros((2, worker.vector.LANES), np.float32)
    worker._read(values, sums)
    assert sums.sum() == values.sum()
    facts = worker.bandwidth(1)
    assert min(facts["by_kernel"], facts["by_numpy"]) > 1e8
    assert max(facts["by_kernel"], facts["by_numpy"]) == facts["sustained"] < 1e12


def test_a_reading_is_what_half_of_the_passes_of_the_faster_way_reach(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = module("vs_worker")
    monkeypatch.setattr(worker, "_memory", lambda: np.ones(1, np.float32))
    monkeypatch.setattr(worker, "read_by_kernel", lambda *_: [5e10, 4e10, 7e10])
    monkeypatch.setattr(worker, "read_by_numpy", lambda *_: [4.5e10, 8e10, 4e10])
    assert worker.bandwidth(2) == {
        "by_kernel": 5e10, "by_numpy": 4.5e10, "sustained": 5e10, "best": 8e10,
    }  # fmt: skip


def test_a_worker_whose_threads_never_sleep_is_refused(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = module("vs_protocol")
    monkeypatch.setattr(protocol, "ASLEEP_SECONDS", 0.2)
    script, runs = tmp_path / "worker.py", tmp_path / "runs"
    script.write_text(f"open({str(runs)!r}, 'w').close()\nwhile True: pass\n")
    with protocol.Worker("one", Path(sys.executable), script) as worker:
        while not runs.exists():  # a process that begins may wait for its files
            time.sleep(0.01)
        with pytest.raises(protocol.WorkerError, match="one: its threads still run"):
            worker.wait_until_asleep()
        worker._process.kill()


def test_a_worker_that_fails_or_dies_says_why(module: Any, tmp_path: Path) -> None:
    protocol = module("vs_protocol")
    script = tmp_path / "worker.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from vs_protocol import serve\n"
        "def chat(): print('noise on stdout'); return {'fine': True}\n"
        "def fail(): raise ValueError('a reason\\nin two lines')\n"
        "def die(): sys.exit('last words')\n"
        "serve({'chat': chat, 'fail': fail, 'die': die})\n"
    )
    with protocol.Worker("one", Path(sys.executable), script) as worker:
        assert worker.ask("chat") == {"fine": True}
        with pytest.raises(protocol.WorkerError, match="one: fail: ValueError: a reason in two"):
            worker.ask("fail")
        assert worker.cpu_seconds() >= 0
        with pytest.raises(protocol.WorkerError, match="one died at 'die': last words"):
            worker.ask("die")
    with pytest.raises(protocol.WorkerError, match="does not start"):
        protocol.Worker("two", tmp_path / "nothing", script)


def test_models_are_of_the_published_sizes(models: Any) -> None:
    # The counts of the published checkpoints, in millions.
    published = {
        "tinyllama-1.1b": 1100.0, "llama-3.2-1b": 1235.8, "qwen2.5-0.5b": 494.0,
        "qwen3-30b-a3b": 30532.1, "gpt-oss-20b": 20914.8,
    }  # fmt: skip
    for name, millions in published.items():
        assert models.SHAPES[name].num_weights / 1e6 == pytest.approx(millions, rel=1e-3), name
    # K and V of 22 layers, 4 heads of 64, f16: 22,528 bytes for each position.
    assert models.SHAPES["tinyllama-1.1b"].kv_bytes(100) == 2_252_800


@pytest.fixture
def small(models: Any) -> list[Any]:
    """Every shape, so small that it takes no time."""
    return [
        replace(shape, num_layers=1, width=128, ffn_width=64, num_heads=2, num_kv_heads=1,
                vocab_size=600, head_width=shape.head_width and 64,
                experts=shape.experts and models.Experts(4, 2, 96))
        for shape in models.SHAPES.values()
    ]  # fmt: skip


def test_models_load_and_stay_the_same(models: Any, small: Any, tmp_path: Path) -> None:
    for shape in small:
        path = models.original(shape, tmp_path)
        with open_gguf(path) as file:
            facts = read_architecture(file)
            assert (facts.num_layers, facts.width, facts.vocab_size) == (1, 128, 600)
            assert ("output.weight" in file.tensors) == (not shape.is_tied)
            assert load_tokenizer(file).vocab_size == 600
        before = path.read_bytes()
        stamp = path.stat().st_mtime_ns
        assert models.original(shape, tmp_path).stat().st_mtime_ns == stamp, "made twice"
        path.unlink()
        assert models.original(shape, tmp_path).read_bytes() == before
        other = models.original(replace(shape, rope_base=1.0), tmp_path)
        assert other != path, "another recipe has the same name"
    assert not list(tmp_path.glob(".*")), "parts are left over"


def test_bytes_that_a_token_reads(models: Any, small: Any, tmp_path: Path) -> None:
    for shape in small:
        path = models.original(shape, tmp_path)
        facts = models.file_facts(path)
        unread = 0 if shape.is_tied else 600 * 128
        if shape.experts:  # of four experts a token takes two
            num_biases = 2 * 96 + 128 if shape.arch == "gpt-oss" else 0
            unread += 2 * (3 * 96 * 128 + num_biases)
        assert facts.bytes_per_token == 4 * (shape.num_weights - unread)
        assert facts.bytes_per_token == 4 * (shape.num_weights_used + 600 * 128)
        assert (facts.file_type, facts.main_dtype) == ("F32", "F32")
        assert facts.num_bytes == path.stat().st_size


def test_a_model_that_is_not_finished_has_no_name(models: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def fail() -> None:
        with models.written_whole(path) as partial:
            partial.write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert not list(tmp_path.iterdir())


def test_divergence_of_known_distributions(module: Any, tmp_path: Path) -> None:
    report = module("vs_report")
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.6, 0.15])
    # 40 positions, so that more than one slab is read; logits are free of a constant.
    np.save(tmp_path / "p.npy", np.tile(np.log(p) + 7, (40, 1)).astype(np.float32))
    rows = np.tile(np.log(q), (40, 1))
    rows[::2] = np.log(p)
    np.save(tmp_path / "q.npy", rows.astype(np.float32))
    apart = report.divergence(tmp_path / "p.npy", tmp_path / "q.npy")
    expected = float((p * np.log(p / q)).sum())
    assert apart.kl == pytest.approx(np.tile([0, expected], 20), rel=1e-5, abs=1e-6)
    none = report.divergence(tmp_path / "p.npy", tmp_path / "p.npy")
    assert (none.kl.max(), none.top_1) == (0.0, 1.0)
    difference = report.difference(apart, none)
    assert difference["mean"] == pytest.approx(expected / 2, rel=1e-5)
    # Half the positions 0 and half `expected`: deviation expected / 2, over 39 of 40 freedoms.
    assert difference["standard_error"] == pytest.approx(expected / 2 / 39**0.5, rel=1e-5)
    apart = apart.summary()
    assert apart["kl"] == pytest.approx(expected / 2, rel=1e-5)
    assert apart["kl_worst"] == pytest.approx(expected, rel=1e-5)
    assert apart["top_1"] == 0.5
    assert report.entropy(tmp_path / "p.npy") == pytest.approx(1.5 * np.log(2), rel=1e-5)
    np.save(tmp_path / "short.npy", rows[:5].astype(np.float32))
    with pytest.raises(ValueError, match="beside"):
        report.divergence(tmp_path / "p.npy", tmp_path / "short.npy")


def runs_of(speeds: list[float], *bandwidths: tuple[float, float]) -> list[dict[str, float]]:
    """Runs with the GB/s before and after each; 50 and 45 where none are given."""
    pairs = bandwidths or ((50.0, 45.0),) * len(speeds)
    return [
        {"tokens_per_second": speed, "bandwidth_before": before * 1e9,
         "bandwidth_after": after * 1e9, "number": number}
        for number, (speed, (before, after)) in enumerate(zip(speeds, pairs, strict=True))
    ]  # fmt: skip


def row_of(ours: Mapping[str, list[float]], peer: Mapping[str, list[float]]) -> dict[str, Any]:
    memory = {"peak_bytes": 1_500_000_000, "anonymous_bytes": 0}
    return {
        "type": "Q4_0", "bytes_per_token": 500_000_000, "file_bytes": 600_000_000,
        "kv_bytes": 50_000_000, "memory": {"ours": memory, "peer": memory},
        "tests": {
            test: {"ours": runs_of(ours[test]), "peer": runs_of(peer[test])} for test in ours
        },
        "divergence": {"ours": {"kl": 0.1, "kl_worst": 1.0, "top_1": 0.5},
                       "peer": {"kl": 0.2, "kl_worst": 1.0, "top_1": 0.5},
                       "difference": {"mean": -0.1, "standard_error": 0.03}},
        "out_of_turn": {"ours": 0.0, "peer": 0.5}, "others": 0.5, "engines": {"ours": {}},
        "num_pairs": 3, "num_pairs_left_out": 0,
    }  # fmt: skip


def test_targets_and_tables(module: Any) -> None:
    report = module("vs_report")
    row = row_of(
        {"tg32": [80.0, 82.0, 84.0], "tg32 @ d2000": [60.0, 70.0, 84.0], "pp512": [300.0] * 3},
        {"tg32": [60.0, 60.0, 70.0], "tg32 @ d2000": [61.0, 50.0, 50.0], "pp512": [250.0] * 3},
    )
    found = {target.what: target for target in report.targets(row)}
    values = {
        "tg32: x llama.cpp": (statistics.median([80 / 60, 82 / 60, 84 / 70]), True),
        "tg32: of bandwidth": (82 * 0.5 / 50, True),
        "tg32 @ d2000: x llama.cpp": (1.4, True),
        "tg32 @ d2000: of the speed at depth 0": (70 / 82, True),
        "pp512: x llama.cpp": (1.2, False),
        "peak memory, MB": (1500.0, False),
        "KL to F32, nats": (0.1, True),
    }
    assert {what: (one.value, one.is_met) for what, one in found.items()} == {
        what: (pytest.approx(value), is_met) for what, (value, is_met) in values.items()
    }
    assert found["peak memory, MB"].limit == pytest.approx(1.15 * 600 + 50 + 350)
    lines = report.speed_table([row]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "1.33 (1.20..1.37)" in lines[2]
    assert [cell.strip() for cell in lines[2].split("|")[8:10]] == [
        "82% (80%..84%)", "60% (60%..70%)",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[3].split("|")[6:8]] == [
        "85% (75%..100%)", "83% (71%..102%)",
    ]  # fmt: skip
    row["tests"]["tg32"]["ours"] = runs_of([80.0, 82.0, 84.0], *[(30.0, 41.5)] * 3)
    warnings = [line for line in report.verdicts([row]) if "WARNING" in line]
    assert ["peer used 50%" in one for one in warnings] == [True, False, False]
    assert "others used 50%" in warnings[1]
    assert "faster than the bandwidth" in warnings[2]


def test_what_a_depth_keeps_is_of_pairs_that_count_at_both_depths(module: Any) -> None:
    """The first pair at depth 0 and the last at the depth met memory that was too slow."""
    row = row_of(
        {"tg32": [80.0] * 3, "tg32 @ d2000": [60.0, 64.0]},
        {"tg32": [50.0] * 3, "tg32 @ d2000": [30.0, 40.0]},
    )
    row["tests"]["tg32"] = {"ours": runs_of([80.0] * 3)[1:], "peer": runs_of([1, 50, 90])[1:]}
    kept = module("vs_report")._kept(row, "peer", "tg32 @ d2000")
    assert (kept.low, kept.high) == (0.8, 0.8)
    told = "\n".join(module("vs_report").verdicts([row]))
    assert "WARNING: 2 of 3 pairs of tg32 count" in told
    assert "WARNING: 2 of 3 pairs of tg32 @ d2000 count" in told


def test_a_share_is_of_the_larger_bandwidth_beside_its_own_decode(module: Any) -> None:
    report = module("vs_report")
    row = row_of({"tg32": [1.0], "pp512": [1.0]}, {"tg32": [1.0], "pp512": [1.0]})
    # A token reads 0.5 GB: 40 of 50 GB/s, 21 of 25 in a slow minute, 30 of 31.25.
    ours = runs_of([80.0, 42.0, 60.0], (50.0, 40.0), (20.0, 25.0), (31.25, 24.0))
    theirs = runs_of([40.0, 60.0, 20.0], (25.0, 20.0), (30.0, 60.0), (10.0, 40.0))
    row["tests"]["tg32"] = {"ours": ours, "peer": theirs}
    shares = report.bandwidth_shares(row)
    assert list(shares) == ["tg32"]
    assert shares["tg32"]["ours"] == pytest.approx({"median": 0.84, "low": 0.8, "high": 0.96})
    assert shares["tg32"]["peer"] == pytest.approx({"median": 0.5, "low": 0.25, "high": 0.8})
    cells = [cell.strip() for cell in report.speed_table([row]).splitlines()[2].split("|")]
    assert cells[8:10] == ["84% (80%..96%)", "50% (25%..80%)"]


@pytest.mark.parametrize(
    ("bandwidths", "median", "is_met"),
    [((45.0, 50.0, 80.0), 41 / 50, True), ((45.0, 52.0, 53.0), 41 / 52, False)],
)
def test_the_bandwidth_target_is_judged_by_the_median_of_the_shares(
    module: Any, bandwidths: tuple[float, ...], median: float, is_met: bool
) -> None:
    row = row_of({"tg32": [82.0] * 3}, {"tg32": [82.0] * 3})
    row["tests"]["tg32"]["ours"] = runs_of([82.0] * 3, *[(one, 1.0) for one in bandwidths])
    targets = module("vs_report").targets(row)
    (target,) = [one for one in targets if one.what == "tg32: of bandwidth"]
    assert (target.value, target.limit) == (pytest.approx(median), 0.8)
    assert target.is_met == is_met
    assert f"({41 / bandwidths[2]:.4g}..{41 / bandwidths[0]:.4g})" in str(target)


def test_one_engine_alone_gets_no_ratios(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert rig.run({}, "--only", "peer") == 0
    printed = capsys.readouterr().out
    assert "200.00" in printed
    assert "x llama.cpp" not in printed
    assert {event[0] for event in rig.events()} == {"peer", "reads"}
