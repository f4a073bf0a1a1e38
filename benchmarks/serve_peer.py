"""What clients of `hypo serve` see under a load, what bounds it, and beside it another server.

With `--peer` both servers run all the time and are asked in turns, so that the machine's moods meet
both. The first turn of each does not count. `{model}` and `{port}` in the peer's words are filled
in. Of ours the tokens that were computed in a second (prompts but for what was cached, and answers)
stand beside what `hypo bench` reaches for prompts in the same run, and the processor time of each
process beside that of all processors. Writes benchmarks/results/serve_peer.json.

    python benchmarks/serve_peer.py model.gguf \\
        --peer 'llama-server -m {model} --port {port} -np 16 -c 16384 -t 2'
    python benchmarks/serve_peer.py model.gguf --shared-prefix 500 --prompt-length 8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from serve_process import child_pids, cpu_seconds, free_port, own_command, running

from hypocenter.server.load import Figures, Load, run_load

ROOT = Path(__file__).parent.parent
#: The most tokens that a word of the load's prompts takes, with the bundled tokenizer too.
TOKENS_PER_WORD = 8


@dataclass(frozen=True)
class Measured:
    """A turn of one server; of ours also processor seconds of each process."""

    figures: Figures
    cpu_seconds: dict[str, float]

    @property
    def computed_per_second(self) -> float:
        figures = self.figures
        num_computed = figures.prompt_tokens - figures.cached_tokens + figures.output_tokens
        return num_computed / figures.seconds

    @property
    def share_of_cpus(self) -> dict[str, float]:
        whole = self.figures.seconds * len(os.sched_getaffinity(0))
        return {name: seconds / whole for name, seconds in self.cpu_seconds.items()}


def main() -> int:
    options = _options()
    ports = [free_port(), free_port()]
    num_words = options.shared_prefix + options.prompt_length
    context = num_words * TOKENS_PER_WORD + options.output_length
    num_most = max(options.streams)
    words = ["-np", str(num_most), "-c", str(context), "--kv-tokens", str(context * num_most)]
    own = own_command(options.model, ports[0], *words)
    reachable = _prompt_speed(options.model)
    print(f"hypo bench: {reachable:.1f} tokens of prompts a second", flush=True)
    rows = []
    with contextlib.ExitStack() as stack:
        pid = stack.enter_context(running(own, ports[0]))
        pids = [pid, *child_pids(pid)]
        if options.peer:
            filled = [
                w.format(model=options.model, port=ports[1]) for w in shlex.split(options.peer)
            ]
            stack.enter_context(running(filled, ports[1]))
        for num_streams in options.streams:
            turns = []
            for turn in range(options.turns + 1):
                of_turn = [_measure(ports[0], num_streams, turn, options, pids)]
                if options.peer:
                    of_turn.append(_measure(ports[1], num_streams, turn, options, []))
                turns.append(of_turn)
            rows.append((num_streams, turns[1:]))
    _show(rows, reachable)
    report = {
        "model": Path(options.model).name if options.model else "the bundled one",
        "machine": platform.machine(),
        "shared_words": options.shared_prefix,
        "prompt_words": options.prompt_length,
        "output_tokens": options.output_length,
        "bench_prompt_tokens_per_second": reachable,
        "rows": [
            {"streams": num, "turns": [[_as_json(one) for one in turn] for turn in turns]}
            for num, turns in rows
        ],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?", help="else the bundled one")
    parser.add_argument("--peer", help="command of the peer, as one text")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--shared-prefix", type=int, default=0, help="words that all begin with")
    parser.add_argument("--prompt-length", type=int, default=24, help="words of each prompt's own")
    parser.add_argument("--output-length", type=int, default=64, help="tokens")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/serve_peer.json")
    return parser.parse_args()


def _prompt_speed(model: str | None) -> float:
    """Tokens of prompts a second, by `hypo bench`; the median of its repetitions."""
    command = [sys.executable, "-P", "-m", "hypocenter", "bench", *filter(None, [model])]
    command += ["-p", "512", "-n", "0", "-r", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    speeds: list[float] = json.loads(done.stdout)["tests"][0]["tokens_per_second"]
    return statistics.median(speeds)


def _measure(
    port: int, num_streams: int, turn: int, options: argparse.Namespace, pids: Sequence[int]
) -> Measured:
    load = Load(
        url=f"http://127.0.0.1:{port}",
        num_requests=3 * num_streams if num_streams == 1 else 2 * num_streams,
        concurrency=num_streams,
        shared_prefix=options.shared_prefix,
        prompt_length=options.prompt_length,
        output_length=options.output_length,
        seed=turn,
    )
    before = [cpu_seconds(pid) for pid in pids]
    figures, _ = run_load(load)
    after = [cpu_seconds(pid) for pid in pids]
    if figures.num_errors:
        raise SystemExit(f"port {port}: {figures.first_error}")
    spent = [end - begin for begin, end in zip(before, after, strict=True)]
    return Measured(figures, dict(zip(("server", "worker"), spent, strict=False)))


def _show(rows: Sequence[tuple[int, list[list[Measured]]]], reachable: float) -> None:
    print("| streams | output tokens/s | first token, p50 in ms |", end="")
    print(" computed tokens/s, of `hypo bench` | CPUs: server, worker | server, µs a token |")
    print("|---" * 6 + "|")
    for num_streams, turns in rows:
        own = [turn[0] for turn in turns]
        speeds = [[one.figures.output_tokens_per_second for one in turn] for turn in turns]
        first = [[one.figures.ttft_ms["p50"] for one in turn] for turn in turns]
        computed = statistics.median(one.computed_per_second for one in own)
        shares = [statistics.median(o.share_of_cpus[n] for o in own) for n in ("server", "worker")]
        per_token = statistics.median(
            one.cpu_seconds["server"] / one.figures.output_tokens for one in own
        )
        print(
            f"| {num_streams} | {_compare(speeds)} | {_compare(first)} "
            f"| {computed:.1f}, {computed / reachable:.0%} "
            f"| {shares[0]:.1%}, {shares[1]:.1%} | {1e6 * per_token:.0f} |"
        )


def _compare(turns: Sequence[Sequence[float]]) -> str:
    """Our median; beside a peer also its median, and the median ratio with lowest and highest."""
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    shown = ", ".join(f"{value:.1f}" for value in medians)
    if len(medians) == 1:
        return shown
    ratios = sorted(own / peer for own, peer in turns)
    return f"{shown}, {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _as_json(measured: Measured) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(measured)
    return fields | {"computed_tokens_per_second": measured.computed_per_second}


if __name__ == "__main__":
    sys.exit(main())
