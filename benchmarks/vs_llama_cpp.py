"""hypocenter beside llama.cpp on the same synthetic model, run by turns: speed, memory, divergence.

    python benchmarks/vs_llama_cpp.py --peer PEER/bin/python
    python benchmarks/vs_llama_cpp.py --peer PEER/bin/python --types Q4_0 --rounds 3 --depth 0
    python benchmarks/vs_llama_cpp.py --peer PEER/bin/python --bandwidth 45
    python benchmarks/vs_llama_cpp.py --peer PEER/bin/python --types F16 F16-bf16
    python benchmarks/vs_llama_cpp.py --peer PEER/bin/python --shape qwen3-30b-a3b --layers 12
    python benchmarks/vs_llama_cpp.py --device cuda --peer BUILD/bin    (--help: options of cards)

PEER is an environment with llama-cpp-python (`pip install '.[bench]'`). Prints markdown tables and
the targets, and writes everything to benchmarks/results/. Exit code 0: measured (targets may be
missed); 1: a worker failed, or did something else than was asked for; 2: wrong arguments.
F16-bf16 is the F16 file with ours multiplying in bf16; it has no targets.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import vs_report
from llvmlite import binding
from vs_arguments import natural, positive
from vs_models import (
    OF_EXPERTS,
    PEER_WORKER,
    SHAPES,
    BenchmarkError,
    file_facts,
    may_have,
    original,
    quantised,
    run_peer,
    written_whole,
)
from vs_protocol import Facts, Worker, WorkerError
from vs_turns import Asked, Plan, Turns, random_tokens, require_load, require_run

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ours": Path(__file__).with_name("vs_worker.py"), "peer": PEER_WORKER}
BATCH = 512
NUM_DIVERGENCE_TOKENS = 256


def main() -> int:
    sys.path.append(str(ROOT / "tests/support"))  # for random blocks
    if any(word.startswith("--device") for word in sys.argv):
        import vs_gpu

        return vs_gpu.main()
    options = _options()
    try:
        report = run(options)
    except (BenchmarkError, WorkerError, OSError) as error:
        print(f"vs_llama_cpp: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    path = options.out or _default_out(options, report)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    _print(report)
    if path:
        print(f"\n{path}")
    return 0


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    shape = options.shape = SHAPES[options.shape].cut(options.layers)
    usual = [shape.usual_type] if shape.usual_type else [*vs_report.SPEED_TARGETS]
    options.types = list(dict.fromkeys(options.types or usual))
    options.depth = sorted({0, *options.depth})
    needed = _context_length(options)
    num_cores = len(os.sched_getaffinity(0))
    if needed > shape.context_length:
        parser.error(f"{needed} positions are needed, but {shape.name} has {shape.context_length}")
    if options.threads > num_cores:
        parser.error(f"--threads is {options.threads}, but this process has {num_cores} cores")
    if not os.access(options.peer, os.X_OK) or options.peer.is_dir():
        parser.error(f"--peer {options.peer} is no interpreter; it must be one with llama_cpp")
    if unfit := [kind for kind in options.types if not may_have(shape, kind)]:
        parser.error(f"{shape.name} has no file of type {unfit[0]}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, types = parser.add_argument, list(vs_report.SPEED_TARGETS)
    choices = [*types, *vs_report.APART, OF_EXPERTS]
    add("--peer", type=Path, required=True, help="the Python that has llama_cpp")
    add("--shape", choices=SHAPES, default="tinyllama-1.1b", help="(default: tinyllama-1.1b)")
    add("--layers", type=positive, metavar="N", help="the first N of the shape (default: all)")
    text = f"file types, of {', '.join(choices)} (default: the first {len(types)}, of experts one)"
    add("--types", nargs="+", choices=choices, metavar="TYPE", help=text)
    add("--threads", type=positive, default=2, help="of both engines (default: 2)")
    add("--prompt", type=positive, default=512, help="tokens of a prompt (default: 512)")
    add("--generate", type=positive, default=32, help="decode steps of a run (default: 32)")
    text = "tokens in the cache before decode, besides 0 (default: 2000)"
    add("--depth", type=natural, nargs="+", metavar="N", default=[2000], help=text)
    add("--rounds", type=positive, default=3, help="rounds of all tests that count (default: 3)")
    text = "pairs of decodes of a round at each depth (default: 4)"
    add("--pairs", type=positive, default=4, help=text)
    text = "GB/s that memory gives at least beside each pair of decodes that counts (default: 0)"
    add("--bandwidth", type=natural, default=0, metavar="N", help=text)
    text = "folder for the models, some 10 GB (default: hypocenter-models in the user's cache)"
    add("--models", type=Path, default=_cache_folder(), help=text)
    text = "result file (default: in benchmarks/results/, by shape and processor; none with --only)"
    add("--out", type=Path, help=text)
    add("--only", choices=tuple(SCRIPTS), help="one engine, for a quick look")
    add("--no-divergence", action="store_true", help="leave out the comparison with F32")
    return parser


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hypocenter-models"


def _context_length(options: argparse.Namespace) -> int:
    """Positions of the context: a batch at least, rounded up as llama.cpp rounds them."""
    needed = max(options.prompt, max(options.depth) + options.generate, BATCH)
    return int(-(-needed // 256) * 256)


def run(options: argparse.Namespace) -> Facts:
    """Everything that the result file holds. Raises BenchmarkError or WorkerError."""
    began, shape = time.perf_counter(), options.shape
    version = _peer_version(options.peer)
    _say(f"{shape.name}: {shape.num_weights / 1e9:.2f} G weights in {options.models}")
    files, reference = _files(options, version)
    with Worker("meter", Path(sys.executable), SCRIPTS["ours"]) as meter:
        rows = [_measure(options, *file, reference, meter, began) for file in files.items()]
    for row in rows:
        row["bandwidth_shares"] = vs_report.bandwidth_shares(row)
        verdicts = vs_report.targets(row)
        row["targets"] = [asdict(one) | {"is_met": one.is_met} for one in verdicts]
    asked = ("threads", "prompt", "generate", "depth", "rounds", "pairs", "bandwidth", "only")
    return {
        "shape": asdict(shape), "llama_cpp_python": version, "processor": _processor(),
        "python": platform.python_version(), "date": datetime.date.today().isoformat(),
        "options": {name: getattr(options, name) for name in asked},
        "bytes_per_second": max(_bandwidths(rows)),
        "reference_entropy": vs_report.entropy(reference) if reference else None,
        "types": rows,
    }  # fmt: skip


def _files(options: argparse.Namespace, version: str) -> tuple[dict[str, Path], Path | None]:
    """A file of each type, and the logits of the original. Of experts there is no original: in F32
    they are ten times as large as what is measured, and no quantiser is needed for speed."""
    shape = options.shape
    kinds = {kind: vs_report.APART.get(kind, kind) for kind in options.types}
    if shape.experts:
        from vs_blocks import made_of_blocks

        return {name: made_of_blocks(shape, kinds[name], options.models) for name in kinds}, None
    source = original(shape, options.models)
    files = {
        name: quantised(source, kind, options.peer, options.threads) for name, kind in kinds.items()
    }
    return files, None if options.no_divergence else _reference(options, source, version)


def _measure(
    options: argparse.Namespace, kind: str, path: Path, reference: Path | None, meter: Worker,
    began: float,
) -> Facts:  # fmt: skip
    """One file: speeds first, then the peak of memory, and only then what needs more memory."""
    shape, facts = options.shape, file_facts(path)
    asked = Asked(
        facts, options.threads, _context_length(options), BATCH,
        float_products="bf16" if kind in vs_report.APART else "exact",
    )  # fmt: skip
    plan = Plan(
        options.prompt, options.generate, tuple(options.depth), options.rounds,
        options.pairs, shape.vocab_size, options.bandwidth * 1e9,
    )  # fmt: skip
    row: Facts = {
        "type": kind, "has_experts": shape.experts is not None, "main_dtype": facts.main_dtype,
        "file_bytes": facts.num_bytes, "bytes_per_token": facts.bytes_per_token,
        "kv_bytes": shape.kv_bytes(asked.context_length),
        "divergence": {}, "load_seconds": {},
    }  # fmt: skip
    with ExitStack() as stack:
        names = [options.only] if options.only else list(SCRIPTS)
        workers = {name: stack.enter_context(_worker(name, options.peer)) for name in names}
        for name, worker in workers.items():
            started = time.perf_counter()
            loaded = worker.ask("load", path=str(path), **asked.load_arguments(name))
            row["load_seconds"][name] = time.perf_counter() - started
            require_load(asked, name, loaded)
        turns = Turns(workers, meter, asked, plan, lambda line: _say(f"{kind} {line}"), began)
        row["tests"] = {
            test: {name: [asdict(run) for run in runs] for name, runs in by_engine.items()}
            for test, by_engine in turns.tests().items()
        }
        row["bandwidth"] = turns.readings
        row["out_of_turn"], row["others"] = turns.out_of_turn, turns.others
        row["num_pairs"] = options.rounds * options.pairs
        row["num_pairs_left_out"] = turns.num_pairs_left_out
        row["memory"] = {name: worker.ask("memory") for name, worker in workers.items()}
        row["engines"] = {name: worker.ask("facts") for name, worker in workers.items()}
        for name in workers:
            require_load(asked, name, row["engines"][name])
        if reference:
            tokens = random_tokens(shape.vocab_size, NUM_DIVERGENCE_TOKENS)
            row["divergence"] = _divergences(workers, asked, tokens, reference)
    return row


def _worker(name: str, peer: Path = Path()) -> Worker:
    python = peer if name == "peer" else Path(sys.executable)
    return Worker(name, python, SCRIPTS[name])


def _reference(options: argparse.Namespace, source: Path, version: str) -> Path:
    """Logits of llama.cpp's run of the F32 file, cache in f32, plain attention; made once."""
    tokens = random_tokens(options.shape.vocab_size, NUM_DIVERGENCE_TOKENS)
    key = hashlib.sha256(json.dumps([version, tokens]).encode()).hexdigest()[:8]
    path = source.with_name(source.stem + f"-logits-{key}.npy")
    if not path.exists():
        _say("llama.cpp runs the F32 file")
        asked = Asked(file_facts(source), options.threads, BATCH, BATCH, kv_dtype="f32")
        with _worker("peer", options.peer) as worker, written_whole(path) as partial:
            arguments = asked.load_arguments("peer") | {"path": str(source), "is_reference": True}
            require_load(asked, "reference", worker.ask("load", **arguments))
            facts = worker.ask("logits", tokens=tokens, out=str(partial))
            require_run(asked, "reference", len(tokens), facts)
    return path


def _divergences(
    workers: Mapping[str, Worker], asked: Asked, tokens: list[int], reference: Path
) -> Facts:
    found = {}
    for name, worker in workers.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "logits.npy"
            facts = worker.ask("logits", tokens=tokens, out=str(path))
            require_run(asked, name, len(tokens), facts)
            found[name] = vs_report.divergence(reference, path)
    told: Facts = {name: one.summary() for name, one in found.items()}
    if len(found) == 2:
        told["difference"] = vs_report.difference(**found)
    return told


def _peer_version(peer: Path) -> str:
    version = run_peer(peer, "version").strip()
    if not version:
        raise BenchmarkError(f"{peer} ran, but told no version of llama_cpp; is it a Python?")
    return version


def _processor() -> str:
    """The system's name for it and LLVM's, for a virtual machine may tell the maker alone."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {binding.get_host_cpu_name()}"


def _default_out(options: argparse.Namespace, report: Facts) -> Path | None:
    if options.only:
        return None
    slug = re.sub(r"[^a-z0-9]+", "-", report["processor"].lower()).strip("-")
    return ROOT / f"benchmarks/results/vs-llama-cpp-{options.shape.name}-{slug}.json"


def _bandwidths(rows: Sequence[Facts]) -> list[float]:
    """Bytes per second of every reading of the run."""
    return [one["sustained"] for row in rows for one in row["bandwidth"]]


def _print(report: Facts) -> None:
    rows = report["types"]
    slowest, fastest = (pick(_bandwidths(rows)) / 1e9 for pick in (min, max))
    print(
        f"{report['shape']['name']}, {report['options']['threads']} threads, "
        f"{report['processor']}, reads {slowest:.1f} to {fastest:.1f} GB/s"
    )
    for facts in rows[0]["engines"].values():
        print(f"- {facts['engine']}: {facts['instructions']}")
        for note in facts.get("notes", ()):
            if "flash" in note.lower():
                print(f"  - {' '.join(note.split())}")
    print("\n" + vs_report.speed_table(rows))
    print("\n" + vs_report.memory_table(rows) + "\n")
    print("\n".join(vs_report.verdicts(rows)))


def _say(line: str) -> None:
    print(f"vs_llama_cpp: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
