"""What HTTP adds: tokens a second of `hypo serve`, and of the engine in a process of its own.

Both answer the same prompts, so many at once, one wave after the other. The engine takes a wave by
`LLM.generate`. Prints a line of JSON, with the processors that the server's front, its worker and
the clients took.

    python benchmarks/serve_beside_engine.py model.gguf --device cuda --streams 64
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from serve_process import child_pids, cpu_seconds, free_port, own_command, running

from hypocenter import LLM
from hypocenter.server.load import Load, make_requests, run_load


def main() -> int:
    options = _options()
    if options.is_engine:
        print(_engine_speed(options))
        return 0
    own = subprocess.run(
        [sys.executable, *sys.argv, "--is-engine"], check=True, stdout=subprocess.PIPE, text=True
    )
    row: dict[str, Any] = {"streams": options.streams, "engine": float(own.stdout)}
    row |= _serve_speed(options)
    row["serve_over_engine"] = round(row["serve"] / row["engine"], 3)
    print(json.dumps(row))
    return 0


def _load(options: argparse.Namespace, wave: int, port: int = 0) -> Load:
    return Load(
        url=f"http://127.0.0.1:{port}",
        num_requests=options.streams,
        concurrency=options.streams,
        prompt_length=options.prompt_length,
        output_length=options.output_length,
        token_ids=tuple(options.token_ids),
        seed=wave,
    )


def _engine_speed(options: argparse.Namespace) -> float:
    """The median of the waves but the first, which captures and warms."""
    speeds: list[float] = []
    with LLM(
        options.model,
        device=options.device,
        context_length=options.context,
        max_batch_requests=options.streams,
    ) as llm:
        for wave in range(options.waves + 1):
            prompts = [asked.prompt for asked in make_requests(_load(options, wave))]
            began = time.perf_counter()
            found = llm.generate(
                prompts, max_tokens=options.output_length, temperature=0, ignore_eos=True
            )
            seconds = time.perf_counter() - began
            speeds.append(sum(len(one.token_ids) for one in found) / seconds)
    middle: float = sorted(speeds[1:])[options.waves // 2]
    return round(middle, 1)


def _serve_speed(options: argparse.Namespace) -> dict[str, Any]:
    port, speeds, busy = free_port(), [], []
    words = ["--device", options.device, "-c", str(options.context), "-np", str(options.streams)]
    with running(own_command(options.model, port, *words), port) as pid:
        run_load(_load(options, 0, port))
        processes = [pid, os.getpid(), *child_pids(pid)]
        for wave in range(1, options.waves + 1):
            before = list(map(cpu_seconds, processes))
            figures, _ = run_load(_load(options, wave, port))
            if figures.num_errors:
                raise SystemExit(figures.first_error)
            after = map(cpu_seconds, processes)
            took = [(b - a) / figures.seconds for a, b in zip(before, after, strict=True)]
            speeds.append(figures.output_tokens_per_second)
            busy.append([took[0], max(took[2:]), took[1]])
    middle = sorted(range(options.waves), key=speeds.__getitem__)[options.waves // 2]
    names = ("front_busy", "worker_busy", "clients_busy")
    shown = {name: round(one, 2) for name, one in zip(names, busy[middle], strict=True)}
    return {"serve": round(speeds[middle], 1), **shown}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prompt-length", type=int, default=128, help="tokens")
    parser.add_argument("--output-length", type=int, default=128, help="tokens")
    parser.add_argument("--token-ids", type=int, nargs=2, default=(300, 30000), help="of prompts")
    parser.add_argument("--is-engine", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
