"""Several cards behind one server: tokens a second beside one card, and a replica that is killed.

    python benchmarks/replicas.py model.gguf --device cuda --replicas 2
    python benchmarks/replicas.py model.gguf --device cuda --words='-tp 2' --replicas 1

The same load is asked of a server with one replica and of one with so many: of prompts that are new
and of the same again, which the prefix caches have. Then a worker of the latter is killed while all
streams are open: each answer is compared with that of the load before, in which nothing was killed.
Prints a line of JSON for each, with the processors that front, workers and clients took.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from large_gguf import write_8b
from serve_process import cpu_seconds, free_port, own_command, running

from hypocenter.server.load import Figures, Load, run_load
from hypocenter.server.load_client import Asked

_KEY = "key-of-the-benchmark"


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            model = str(Path(folder) / "model-8b.gguf")
            write_8b(Path(model))
        is_right = True
        for num in options.counts or sorted({1, options.replicas}, reverse=True):
            is_right &= _measure(model, num, options)
    return 0 if is_right else 4


def _measure(model: str, num: int, options: argparse.Namespace) -> bool:
    """One server; False where a kill changed or lost an answer."""
    port, began = free_port(), time.monotonic()
    words = [
        "--device",
        options.device,
        "-c",
        str(options.context),
        "-np",
        str(options.streams),
        "--admin-key",
    ]
    words += [_KEY, "--replicas", str(num), *shlex.split(options.words)]
    command = own_command(model, port, *words)
    with running(command, port) as pid:
        first_seconds = time.monotonic() - began
        while num > 1 and any(
            one["state"] != "ready" for one in _told(port, "/health")["replicas"]
        ):
            time.sleep(0.1)
        row: dict[str, Any] = {"replicas": num, "first_ready_seconds": round(first_seconds, 1)}
        row["all_ready_seconds"] = round(time.monotonic() - began, 1)
        workers = [one["worker_pid"] for one in _told(port, "/debug/requests")["replicas"]]
        processes = [pid, *workers, os.getpid()]
        _load(port, num, options, seed=0)  # whatever is to be captured is
        for what in ("new prompts", "the same again"):
            before = list(map(cpu_seconds, processes))
            figures, asked = _load(port, num, options)
            after = map(cpu_seconds, processes)
            busy = [(b - a) / figures.seconds for a, b in zip(before, after, strict=True)]
            row |= {
                "prompts": what,
                "streams": options.streams * num,
                "tokens_per_second": round(figures.output_tokens_per_second, 1),
                "front_busy": round(busy[0], 2),
                "workers_busy": [round(one, 2) for one in busy[1:-1]],
                "clients_busy": round(busy[-1], 2),
                "ttft_ms": figures.ttft_ms,
                "itl_ms": figures.itl_ms,
                "errors": figures.num_errors,
            }
            print(json.dumps(row), flush=True)
        return num == 1 or _kill_one(port, num, options, asked)


def _kill_one(port: int, num: int, options: argparse.Namespace, before: Sequence[Asked]) -> bool:
    """The same load, and a worker killed within it; whether each answer is that of before."""
    pid = _told(port, "/debug/requests")["replicas"][-1]["worker_pid"]
    killing = threading.Timer(options.kill_after, os.kill, [pid, signal.SIGKILL])
    killing.start()
    figures, asked = _load(port, num, options)
    killing.join()
    pairs = list(zip(before, asked, strict=True))
    num_equal = sum(one.text == other.text and not other.error for one, other in pairs)
    gaps = [
        max((b - a for a, b in zip(one.times, one.times[1:], strict=False)), default=0.0)
        for one in asked
    ]
    row = {
        "killed": pid,
        "equal_answers": f"{num_equal} of {len(pairs)}",
        "errors": figures.num_errors,
        "tokens_per_second": round(figures.output_tokens_per_second, 1),
        "longest_gaps_ms": [round(1e3 * gap) for gap in sorted(gaps)[-3:]],
        "health": _told(port, "/health"),
    }
    print(json.dumps(row), flush=True)
    return num_equal == len(pairs)


def _load(
    port: int, num: int, options: argparse.Namespace, seed: int = 1
) -> tuple[Figures, list[Asked]]:
    load = Load(
        url=f"http://127.0.0.1:{port}",
        num_requests=options.streams * num * options.rounds,
        concurrency=options.streams * num,
        prompt_length=options.prompt_length,
        token_ids=tuple(options.token_ids),
        output_length=options.output_length,
        seed=seed,
    )
    return run_load(load)


def _told(port: int, path: str) -> Any:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    request.add_header("Authorization", f"Bearer {_KEY}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?", help="without one an 8B of random weights is written")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--counts", type=int, nargs="*", help="instead: numbers of replicas")
    parser.add_argument("--streams", type=int, default=64, help="for each replica")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2, help="answers of each stream")
    parser.add_argument("--prompt-length", type=int, default=128, help="tokens")
    parser.add_argument("--token-ids", type=int, nargs=2, default=(300, 30000), help="of prompts")
    parser.add_argument("--output-length", type=int, default=128)
    parser.add_argument("--kill-after", type=float, default=1.5, help="seconds")
    parser.add_argument("--words", default="", help="further words for hypo serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
