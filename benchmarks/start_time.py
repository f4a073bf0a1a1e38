"""How long a command takes from its start to its end for a few tokens, beside a peer's.

Both run in turns, everything warm: the first turn of each does not count. `{model}` and `{tokens}`
in the peer's words are filled in. Writes benchmarks/results/start_time.json.

    python benchmarks/start_time.py model.gguf --peer 'llama-simple -m {model} -n {tokens} Once'
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUM_TOKENS = (1, 8)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--peer", required=True, help="command of the peer, as one text")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    rows = []
    print("| tokens | hypo run, s | peer, s | ratio: median (low to high) |\n|---|---|---|---|")
    for num_tokens in NUM_TOKENS:
        own = [sys.executable, "-m", "hypocenter", "run", options.model, "-p", "Once", "-q"]
        own += ["-n", str(num_tokens), "--ignore-eos"]
        peer = [
            word.format(model=options.model, tokens=num_tokens)
            for word in shlex.split(options.peer)
        ]
        turns = [(_seconds(own), _seconds(peer)) for _ in range(options.turns + 1)][1:]
        ratios = sorted(ours / theirs for ours, theirs in turns)
        medians = [statistics.median(column) for column in zip(*turns, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {num_tokens} | {medians[0]:.2f} | {medians[1]:.2f} | {spread} |", flush=True)
        rows.append({"num_tokens": num_tokens, "turns_seconds": turns})
    report = {"model": Path(options.model).name, "machine": platform.machine(), "rows": rows}
    path = ROOT / "benchmarks/results/start_time.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
