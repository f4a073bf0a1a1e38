"""hypocenter beside llama.cpp on one GPU: whole commands of both by turns, on the same files.

    python benchmarks/vs_llama_cpp.py --device cuda --peer BUILD/bin
    python benchmarks/vs_llama_cpp.py --device cuda --peer BUILD/bin --types Q4_0 --rounds 1
    python benchmarks/vs_llama_cpp.py --device cuda --peer BUILD/bin --shape gpt-oss-20b

BUILD/bin holds llama-bench and llama-batched-bench, built with CUDA. The models have random
blocks, and an 8B Llama's shape where no other is named. Their folder is best in memory (--models
/dev/shm/models). Prints a table and writes everything to benchmarks/results/. Exit code 0:
measured (goals may be missed); 1: a command failed; 2: wrong arguments.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vs_arguments import natural, positive
from vs_blocks import made_of_blocks
from vs_models import OF_EXPERTS, SHAPES, BenchmarkError, Shape, file_facts, may_have
from vs_report import Ratio, Target, markdown

ROOT = Path(__file__).resolve().parent.parent
COMMAND_SECONDS = 400
USUAL_SHAPE = "llama-3.1-8b"
#: Goals as multiples of llama.cpp's speed: prompts of 512 and of 2,048, decode, batches.
GOALS = {
    "F16": {"pp512": 1.5, "pp2048": 1.6, "tg128": 1.15, "batch": 1.5},
    "Q8_0": {"pp512": 2.0, "pp2048": 2.2, "tg128": 1.3, "batch": 1.3},
    "Q4_K_M": {"pp512": 2.0, "pp2048": 2.2, "tg128": 1.35, "batch": 1.3},
    "Q4_0": {"pp512": 2.0, "pp2048": 2.2, "tg128": 1.45, "batch": 1.3},
}
#: Of mixtures of experts of any type.
EXPERTS_GOALS = {"pp512": 1.0, "pp2048": 1.0, "tg128": 1.2}
GOAL_BATCHES = (16, 32, 64)
ENGINES = ("ours", "peer")

Facts = dict[str, Any]
#: Tokens per second of each repetition, by test: names as `hypo bench` gives them.
Speeds = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        path = run(options)
    except (BenchmarkError, OSError) as error:
        print(f"vs_llama_cpp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(told(json.loads(path.read_text())))
    print(f"\n{path}")
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vs_llama_cpp.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add(
        "--device",
        default="cuda",
        help="of ours (default: cuda); any other but hip tries the script out",
    )
    add("--peer", type=Path, required=True, help="the folder of llama-bench")
    add("--shape", choices=SHAPES, default=USUAL_SHAPE, help=f"(default: {USUAL_SHAPE})")
    add("--layers", type=positive, metavar="N", help="the first N of the shape (default: all)")
    types = [*GOALS, OF_EXPERTS]
    text = f"file types, of {', '.join(types)} (default: the first {len(GOALS)}, of experts one)"
    add("--types", nargs="+", choices=types, metavar="TYPE", help=text)
    add("--prompt", type=positive, nargs="+", metavar="N", default=[512, 2048],
        help="tokens of prompts (default: 512 2048)")  # fmt: skip
    add("--generate", type=positive, default=128, help="decode steps of a run (default: 128)")
    add("--depth", type=natural, nargs="+", metavar="N", default=[0, 2000, 8000],
        help="tokens in the cache before decode (default: 0 2000 8000)")  # fmt: skip
    add("--batches", type=positive, nargs="+", metavar="N", default=[4, 16, 32, 64],
        help="sequences at once (default: 4 16 32 64)")  # fmt: skip
    add("--repetitions", type=positive, default=3, help="of each test (default: 3)")
    add("--rounds", type=positive, default=2, help="turns of both engines (default: 2)")
    add("--models", type=Path, default=Path(tempfile.gettempdir()) / "hypocenter-models",
        help="folder for the models, 36 GB for all types")  # fmt: skip
    add("--out", type=Path, help="result file (default: in benchmarks/results/, by card)")
    options = parser.parse_args(arguments)
    shape = options.shape = SHAPES[options.shape].cut(options.layers)
    options.types = options.types or ([shape.usual_type] if shape.usual_type else [*GOALS])
    if unfit := [kind for kind in options.types if not may_have(shape, kind)]:
        parser.error(f"{shape.name} has no file of type {unfit[0]}")
    # The commands run in the repository's root.
    options.peer, options.models = options.peer.resolve(), options.models.resolve()
    for name in ("llama-bench", "llama-batched-bench"):
        if not os.access(options.peer / name, os.X_OK):
            parser.error(f"--peer {options.peer} holds no {name} that runs")
    return options


def run(options: argparse.Namespace) -> Path:
    """The file of all results, written anew after each type. Raises BenchmarkError."""
    shape = options.shape
    is_card = options.device in ("cuda", "hip")
    card = card_facts() if is_card else {"product": options.device}
    asked = (
        "device", "types", "prompt", "generate", "depth", "batches", "repetitions", "rounds",
    )  # fmt: skip
    report: Facts = {
        "shape": asdict(shape), "card": card, "date": datetime.date.today().isoformat(),
        "options": {name: getattr(options, name) for name in asked}, "types": [], "shares": {},
    }  # fmt: skip
    path: Path = options.out or _default_out(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    for kind in options.types:
        model = made_of_blocks(shape, kind, options.models)
        row = _measure(options, kind, model, is_card)
        report["types"].append(row)
        if is_card:
            report["shares"][kind] = _shares(row, shape, card)
        path.write_text(json.dumps(report, indent=1) + "\n")
    return path


def _measure(options: argparse.Namespace, kind: str, path: Path, is_card: bool) -> Facts:
    facts = file_facts(path)
    speeds: dict[str, Speeds] = {engine: {} for engine in ENGINES}
    row: Facts = {
        "type": kind, "has_experts": options.shape.experts is not None,
        "bytes_per_token": facts.bytes_per_token, "speeds": speeds,
    }  # fmt: skip
    _warm(path)
    for round_number in range(options.rounds):
        turns: list[tuple[str, Callable[[], Speeds]]] = [
            ("ours", lambda: _our_speeds(options, path)),
            ("peer", lambda: _their_speeds(options, path)),
        ]
        for engine, measured in turns if round_number % 2 == 0 else reversed(turns):
            print(f"vs_llama_cpp: {kind}, round {round_number + 1}, {engine}", file=sys.stderr)
            for test, values in measured().items():
                speeds[engine].setdefault(test, []).extend(values)
    # Last, for the first start compiles kernels.
    one = [str(path), "--device", options.device, "-c", "256", "-p", "a", "-n", "1"]
    row["start"] = {
        "ours": _started([sys.executable, "-m", "hypocenter", "run", *one], is_card),
        "peer": _started(
            [*_llama_bench(options, path), "-p", "1", "-n", "1", "-r", "1", "--no-warmup"], is_card
        ),
    }
    return row


def _warm(path: Path) -> None:
    """So that both engines find the file in the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 26):
            pass


def _ours(
    options: argparse.Namespace, path: Path, prompts: Sequence[int], num_generate: int,
    depths: Sequence[int], batches: Sequence[int], repetitions: int,
) -> list[str]:  # fmt: skip
    def listed(nums: Sequence[int]) -> str:
        return ",".join(map(str, nums))

    return [
        sys.executable, "-m", "hypocenter", "bench", str(path), "--device", options.device,
        "-p", listed(prompts), "-n", str(num_generate), "-d", listed(depths),
        "-np", listed(batches), "-r", str(repetitions), "--json",
    ]  # fmt: skip


def _our_speeds(options: argparse.Namespace, path: Path) -> Speeds:
    num, repetitions, depth = options.generate, options.repetitions, [options.prompt[0]]
    single = _ours(options, path, options.prompt, num, options.depth, [1], repetitions)
    many = _ours(options, path, [0], num, depth, options.batches, repetitions)
    found: Speeds = {}
    for command in (single, many):
        for test in json.loads(_output(command))["tests"]:
            name = test["name"] if command is single else _batch(test["num_sequences"])
            found[name] = test["tokens_per_second"]
    return found


def _llama_bench(options: argparse.Namespace, path: Path) -> list[str]:
    return [
        str(options.peer / "llama-bench"), "-m", str(path), "-ngl", "99", "-fa", "1", "-o", "json",
    ]  # fmt: skip


def _their_speeds(options: argparse.Namespace, path: Path) -> Speeds:
    """llama-bench counts as `hypo bench` does; of batches llama-batched-bench tells one figure."""
    prompts, depths = (",".join(map(str, nums)) for nums in (options.prompt, options.depth))
    single = [
        *_llama_bench(options, path), "-p", prompts, "-n", str(options.generate), "-d", depths,
        "-r", str(options.repetitions),
    ]  # fmt: skip
    found: Speeds = {}
    for test in json.loads(_output(single)):
        at = f" @ d{test['n_depth']}" if test["n_depth"] else ""
        name = f"pp{test['n_prompt']}" if test["n_prompt"] else f"tg{test['n_gen']}"
        found[name + at] = test["samples_ts"]
    num_positions = max(options.batches) * (options.prompt[0] + options.generate)
    many = [
        str(options.peer / "llama-batched-bench"), "-m", str(path), "-ngl", "99", "-fa", "on",
        "-c", str(num_positions), "-npp", str(options.prompt[0]), "-ntg", str(options.generate),
        "-npl", ",".join(map(str, options.batches)), "--output-format", "jsonl",
    ]  # fmt: skip
    for line in _output(many).splitlines():
        if line.startswith("{"):
            batch = json.loads(line)
            found[_batch(batch["pl"])] = [batch["speed_tg"]]
    return found


def _batch(num_sequences: int) -> str:
    return f"batch of {num_sequences}"


def _output(command: Sequence[str], **variables: str) -> str:
    """What it prints. Raises BenchmarkError with the end of its complaint."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, cwd=ROOT,
            env=os.environ | variables,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{command[0]} took over {COMMAND_SECONDS} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise BenchmarkError(f"{' '.join(command)}: {last}")
    return done.stdout


def _started(command: Sequence[str], is_card: bool) -> Facts:
    """Of one token: seconds of the whole command, and the card's memory that it took at most."""
    with _Memory() if is_card else _NoMemory() as used:
        began = time.perf_counter()
        _output(command)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "memory_bytes": used.most_bytes}


class _NoMemory:
    most_bytes: int | None = None

    def __enter__(self) -> _NoMemory:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Memory(_NoMemory):
    """What nvidia-smi says of the card's used memory, at most, beyond what was used before."""

    def __enter__(self) -> _Memory:
        self._before = _used_bytes()
        self.most_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._ended.wait(0.3):
                self.most_bytes = max(self.most_bytes or 0, _used_bytes() - self._before)
        except BenchmarkError:
            self.most_bytes = None


def _used_bytes() -> int:
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    told = _output(["nvidia-smi", "-i", card, "--query-gpu=memory.used", "--format=csv,noheader"])
    return int(told.split()[0]) << 20


def card_facts() -> Facts:
    """Name, bytes per second of a copy and operations per second of cuBLAS in bf16.

    Measured in a process of its own, for its context would take memory of the card.
    """
    code = "import json, vs_gpu; print(json.dumps(vs_gpu.measured_card()))"
    path = os.pathsep.join(sys.path)
    facts: Facts = json.loads(_output([sys.executable, "-c", code], PYTHONPATH=path))
    return facts


def measured_card() -> Facts:
    import torch

    def fastest(once: Callable[[], object]) -> float:
        seconds = []
        for _ in range(12):
            torch.cuda.synchronize()
            began = time.perf_counter()
            once()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    num_bytes, size = 4 << 30, 8192
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    one = torch.randn(size, size, dtype=torch.bfloat16, device="cuda")
    return {
        "product": torch.cuda.get_device_name(0), "torch": torch.__version__,
        "copy_bytes_per_second": 2 * num_bytes / fastest(lambda: target.copy_(source)),
        "bf16_per_second": 2 * size**3 / fastest(lambda: one @ one),
    }  # fmt: skip


def _shares(row: Mapping[str, Any], shape: Shape, card: Mapping[str, Any]) -> dict[str, float]:
    """Of copy bandwidth in decode, of the bf16 rate in prompts: what ours reaches at depth 0."""
    per_token = 2 * shape.num_weights_used
    shares = {}
    for test, values in row["speeds"]["ours"].items():
        if "@" in test or test.startswith("batch"):
            continue
        if test.startswith("tg"):
            need, given = row["bytes_per_token"], card["copy_bytes_per_second"]
        else:
            need, given = per_token, card["bf16_per_second"]
        shares[test] = statistics.median(values) * need / given
    return shares


def told(report: Mapping[str, Any]) -> str:
    """The tables and the goals."""
    card = report["card"]
    lines = [f"{report['shape']['name']} on {card['product']}"]
    if "copy_bytes_per_second" in card:
        lines[0] += (
            f", copies {card['copy_bytes_per_second'] / 1e9:.0f} GB/s, "
            f"bf16 {card['bf16_per_second'] / 1e12:.0f} TFLOP/s"
        )
    header = ("type", "test", "ours t/s", "llama.cpp t/s", "ratio (min..max)", "share")
    table: list[tuple[str, ...]] = [header]
    for row in report["types"]:
        for test, ours in row["speeds"]["ours"].items():
            ratio = _ratio(row, test)
            theirs = row["speeds"]["peer"].get(test, [])
            share = report["shares"].get(row["type"], {}).get(test)
            table.append((
                row["type"], test, f"{statistics.median(ours):.1f}",
                f"{statistics.median(theirs):.1f}" if theirs else "", str(ratio or ""),
                "" if share is None else f"{share:.0%}",
            ))  # fmt: skip
    lines += ["", markdown(table, num_left=2), ""]
    starts: list[tuple[str, ...]] = [("type", "engine", "one token, s", "card, MB")]
    for row in report["types"]:
        for engine, start in row["start"].items():
            used = start["memory_bytes"]
            starts.append((
                row["type"], "ours" if engine == "ours" else "llama.cpp",
                f"{start['seconds']:.1f}", "" if used is None else f"{used / 1e6:.0f}",
            ))  # fmt: skip
    lines += [markdown(starts, num_left=2), ""]
    return "\n".join(
        [*lines, *(f"{row['type']}: {goal}" for row in report["types"] for goal in goals(row))]
    )


def goals(row: Mapping[str, Any]) -> list[Target]:
    """Every goal of a type that this run has the figures for."""
    named = dict(EXPERTS_GOALS if row.get("has_experts") else GOALS[row["type"]])
    if batch := named.pop("batch", None):
        named |= {_batch(num): batch for num in GOAL_BATCHES}
    ratios = {test: _ratio(row, test) for test in named}
    return [
        Target(f"{test}: x llama.cpp", ratio.median, named[test])
        for test, ratio in ratios.items()
        if ratio
    ]


def _ratio(row: Mapping[str, Any], test: str) -> Ratio | None:
    """Of pairs in order; where one engine told fewer figures, of that many medians."""
    ours, theirs = (row["speeds"][engine].get(test, []) for engine in ENGINES)
    num = min(len(ours), len(theirs))
    return Ratio.of(_medians(ours, num), _medians(theirs, num)) if num else None


def _medians(values: Sequence[float], num: int) -> list[float]:
    size = len(values) // num
    return [statistics.median(values[at * size : (at + 1) * size]) for at in range(num)]


def _default_out(report: Mapping[str, Any]) -> Path:
    words = [report["card"]["product"].lower()]
    if report["shape"]["name"] != USUAL_SHAPE:
        words.insert(0, report["shape"]["name"])
    slug = re.sub(r"[^a-z0-9.]+", "-", "-".join(words)).strip("-")
    return ROOT / f"benchmarks/results/vs-llama-cpp-{slug}-{report['date']}.json"
