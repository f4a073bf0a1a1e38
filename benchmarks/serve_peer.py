"""What clients of `hypo serve` see, beside those of another server on the same file and load.

Both servers run all the time and are asked in turns, so that the machine's moods meet both. The
first turn of each does not count. `{model}` and `{port}` in the peer's words are filled in. Writes
benchmarks/results/serve_peer.json.

    python benchmarks/serve_peer.py model.gguf \\
        --peer 'llama-server -m {model} --port {port} -np 16 -c 16384 -t 2'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hypocenter.server.load import Figures, Load, run_load

ROOT = Path(__file__).parent.parent
START_SECONDS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--peer", required=True, help="command of the peer, as one text")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt-length", type=int, default=24, help="words")
    parser.add_argument("--output-length", type=int, default=64, help="tokens")
    options = parser.parse_args()
    ports = [_free_port(), _free_port()]
    own = [sys.executable, "-m", "hypocenter", "serve", options.model, "-q", "--bundles", ""]
    own += ["--port", str(ports[0]), "-np", str(max(options.streams)), "-c", "1024"]
    own += ["--kv-tokens", str(1024 * max(options.streams))]
    peer = [word.format(model=options.model, port=ports[1]) for word in shlex.split(options.peer)]
    rows = []
    with _running(own, ports[0]), _running(peer, ports[1]):
        print("| streams | output tokens/s: ours, peer, ratio | TTFT p50, ms: ours, peer, ratio |")
        print("|---|---|---|")
        for num_streams in options.streams:
            turns = [
                [_measure(port, num_streams, turn, options) for port in ports]
                for turn in range(options.turns + 1)
            ][1:]
            print(_row(num_streams, turns), flush=True)
            rows.append({"streams": num_streams, "turns": msgspec.to_builtins(turns)})
    report = {
        "model": Path(options.model).name,
        "machine": platform.machine(),
        "prompt_words": options.prompt_length,
        "output_tokens": options.output_length,
        "rows": rows,
    }
    path = ROOT / "benchmarks/results/serve_peer.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _measure(port: int, num_streams: int, turn: int, options: argparse.Namespace) -> Figures:
    load = Load(
        url=f"http://127.0.0.1:{port}",
        num_requests=3 * num_streams if num_streams == 1 else 2 * num_streams,
        concurrency=num_streams,
        prompt_length=options.prompt_length,
        output_length=options.output_length,
        seed=turn,
    )
    figures, _ = run_load(load)
    if figures.num_errors:
        raise SystemExit(f"port {port}: {figures.first_error}")
    return figures


def _row(num_streams: int, turns: Sequence[Sequence[Figures]]) -> str:
    speeds = [[figures.output_tokens_per_second for figures in turn] for turn in turns]
    first = [[figures.ttft_ms["p50"] for figures in turn] for turn in turns]
    return f"| {num_streams} | {_compare(speeds)} | {_compare(first)} |"


def _compare(pairs: Sequence[Sequence[float]]) -> str:
    """Medians of both, and the median ratio with its lowest and highest."""
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(own / peer for own, peer in pairs)
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return f"{ours:.1f}, {theirs:.1f}, {spread}"


@contextlib.contextmanager
def _running(command: Sequence[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        stop = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > stop:
                raise SystemExit(f"{command[0]} did not begin to serve")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
