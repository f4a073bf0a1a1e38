"""One model on two GPUs of one machine beside one GPU: numbers, speed, and a rank that dies.

    python benchmarks/gpu_ranks.py                   needs two GPUs and 17 GB of disk
    python benchmarks/gpu_ranks.py --shape toy --device sim:h200 --rounds 1     tries it out

Speeds are those of `hypo bench`, by turns; decode is timed from outside as well, as the difference
of two whole commands. Prints a table and writes JSON to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/support"), str(ROOT / "src")]
FAMILIES = ("llama", "gpt-oss", "phi3", "qwen2moe", "gemma2", "glm4moe")
#: As in `tests/model/test_families.py`: largest difference over largest logit.
TOLERANCE = 3e-5
SHORT, LONG = 32, 2080
COMMAND_SECONDS = 400


def main() -> int:
    options = _options()
    report: dict[str, Any] = {"date": datetime.date.today().isoformat(), "device": options.device}
    is_card = not options.device.startswith("sim:")
    if is_card:
        import torch

        report["card"] = torch.cuda.get_device_name()
    only = options.only.split(",")
    out = options.out or ROOT / f"benchmarks/results/ranks-{report['date']}.json"
    if "families" in only:
        report["families"] = []
        for name in FAMILIES:
            report["families"].append(_family(name, options.device))
            print(json.dumps(report["families"][-1]), file=sys.stderr, flush=True)
    if {"speed", "outside", "lost"} & set(only):
        from vs_blocks import made_of_blocks
        from vs_models import SHAPES

        path = made_of_blocks(SHAPES[options.shape], options.type, options.models)
        if "speed" in only:
            report["speed"] = _speeds(path, options)
        if "outside" in only:
            report["outside"] = _outside(path, options)
        if "lost" in only:
            report["lost"] = _lost(path, options.device)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(_table(report))
    return 0 if _is_right(report) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    parser.add_argument("--shape", default="llama-3.1-8b", help="(default: llama-3.1-8b)")
    parser.add_argument("--type", default="F16", help="of the file (default: F16)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of both (default: 2)")
    parser.add_argument("--only", default="families,speed,outside,lost", help="parts of it")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "models")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results/)")
    return parser.parse_args()


def _family(name: str, device: str) -> dict[str, Any]:
    """The largest relative error of a family's logits, of a prompt and of single tokens."""
    import numpy as np
    from models.families import engine_logits, hf_logits, make_family

    row: dict[str, Any] = {"family": name}
    with tempfile.TemporaryDirectory() as folder:
        model = make_family(name, Path(folder))
        for kind, num_tokens, chunk in (("prompt", 48, 512), ("decode", 12, 1)):
            ids = model.token_ids[:num_tokens]
            theirs = hf_logits(model.hf_model, ids)
            ours = engine_logits(
                model.path, ids, model.context_length, chunk, device, tensor_parallel=2
            )
            row[kind] = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    return row


def _speeds(path: Path, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by test and number of GPUs."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for num_ranks in (1, 2) if number % 2 == 0 else (2, 1):
            told = _hypo(
                "bench", str(path), "--device", options.device, "-tp", str(num_ranks),
                "-p", "512,2048", "-n", "128", "-d", "0,2000", "-r", "3", "--json",
            )  # fmt: skip
            for test in json.loads(told)["tests"]:
                speeds = found.setdefault(test["name"], {}).setdefault(str(num_ranks), [])
                speeds.extend(test["tokens_per_second"])
            print(f"round {number + 1}, {num_ranks}: {told}", file=sys.stderr, flush=True)
    return found


def _outside(path: Path, options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second between two whole commands, timed from outside."""
    rates = {}
    for num_ranks in (1, 2):
        seconds: list[float] = []
        # What has to be compiled is, and the file is in memory, before one is timed.
        _run_tokens(path, options.device, num_ranks, SHORT)
        for num_tokens in (SHORT, LONG):
            began = time.perf_counter()
            _run_tokens(path, options.device, num_ranks, num_tokens)
            seconds.append(time.perf_counter() - began)
            print(f"{num_ranks}: {num_tokens} tokens {seconds[-1]} s", file=sys.stderr, flush=True)
        rates[str(num_ranks)] = (LONG - SHORT) / (seconds[1] - seconds[0])
    return rates


def _run_tokens(path: Path, device: str, num_ranks: int, num_tokens: int) -> None:
    _hypo(
        "run", str(path), "--device", device, "-tp", str(num_ranks), "-c", "4096", "-p", "a",
        "-n", str(num_tokens), "--ignore-eos",
    )  # fmt: skip


def _lost(path: Path, device: str) -> dict[str, Any]:
    """What is said when the second rank is killed in the middle of an answer, and how soon."""
    command = [
        sys.executable, "-m", "hypocenter", "run", str(path), "--device", device, "-tp", "2",
        "-c", "4096", "-p", "a", "-n", "4000", "--ignore-eos",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.read(64)  # it answers
        told = subprocess.run(
            ["pgrep", "-P", str(running.pid), "-f", "ranks.program"], capture_output=True, text=True
        )
        os.kill(int(told.stdout.split()[0]), signal.SIGKILL)
        began = time.perf_counter()
        try:
            _, errors = running.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            running.kill()
            _, errors = running.communicate()
            return {"seconds": None, "said": errors.decode()[-2000:]}
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "exit_code": running.returncode, "said": errors.decode()[-1000:]}


def _hypo(*arguments: str) -> str:
    command = [sys.executable, "-m", "hypocenter", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout


def _is_right(report: dict[str, Any]) -> bool:
    rows = report.get("families", [])
    lost = report.get("lost")
    return all(max(row["prompt"], row["decode"]) < TOLERANCE for row in rows) and (
        lost is None or "rank 1 of 2" in lost["said"]
    )


def _table(report: dict[str, Any]) -> str:
    lines = ["| test | one GPU, tokens/s | two | ratio |", "|---|---|---|---|"]
    rows = {
        name: [statistics.median(by["1"]), statistics.median(by["2"])]
        for name, by in report.get("speed", {}).items()
    }
    if outside := report.get("outside"):
        rows["decode, timed from outside"] = [outside["1"], outside["2"]]
    for name, (one, two) in rows.items():
        lines.append(f"| {name} | {one:.1f} | {two:.1f} | {two / one:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
