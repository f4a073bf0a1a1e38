"""What a run with `--nan` costs: the time of training steps, to be run as it is and watched.

    python benchmarks/number_watch.py [cpu|cuda] [--pairs N] [--out FILE]

runs itself in turn alone, below a mode of torch's in Python that does nothing, and watched by
Python and by machine code. It prints the ratios for each size. `--once` prints the median
milliseconds of a step for each size, as it is run. Of a CPU that is the time of one processor,
which other programs do not change much. Of a GPU it is the time of a clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

STARTUP = Path(__file__).resolve().parent.parent / "src" / "hypocenter" / "foreign" / "startup"
#: Width, tokens, sequences, layers; on a CPU and on a GPU. Of the first of each the host is the
#: bound.
SIZES = {
    "cpu": ((16, 8, 2, 12), (128, 64, 4, 12)),
    "cuda": ((256, 128, 4, 12), (1024, 512, 16, 12)),
}
NUM_STEPS, NUM_PAIRS = 12, 3
#: By a way what it sets; an empty mode is asked for by an option.
WAYS: dict[str, dict[str, str]] = {
    "alone": {},
    "empty mode": {},
    "by Python": {"HYPO_NAN": "1", "HYPO_NATIVE": "0"},
    "by machine code": {"HYPO_NAN": "1", "HYPO_NATIVE": "1"},
}


def step_milliseconds(device: str, size: tuple[int, int, int, int]) -> float:
    """The median over the steps of a transformer with AdamW and, on a GPU, autocast."""
    import torch

    clock = time.perf_counter if device == "cuda" else time.process_time
    if device == "cpu":
        torch.set_num_threads(1)
    width, num_tokens, num_sequences, num_layers = size
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = torch.nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(num_sequences, num_tokens, width, device=device)
    mask = torch.triu(torch.full((num_tokens, num_tokens), float("-inf"), device=device), 1)
    taken = []
    for _ in range(NUM_STEPS):
        begun = clock()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(x, mask=mask).float().square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        loss.item()
        taken.append(clock() - begun)
    return 1000 * statistics.median(taken[2:])


def empty_mode() -> Any:
    """A mode that makes each operation as it is: what any watch in Python costs at least."""
    import torch.utils._python_dispatch

    base: Any = torch.utils._python_dispatch.TorchDispatchMode

    class Empty(base):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    return Empty()


def run_once(device: str, way: str) -> dict[str, float]:
    """The steps in a process of their own."""
    environment = {**os.environ, **WAYS[way]}
    if WAYS[way]:
        paths = (str(STARTUP), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, __file__, device, "--once"]
    command += ["--empty"] * (way == "empty mode")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def compare(device: str, num_pairs: int) -> list[dict[str, Any]]:
    """By size and way the medians over the turns, and least, median and most of the ratios."""
    turns = [{way: run_once(device, way) for way in WAYS} for _ in range(num_pairs)]
    rows = []
    for size in turns[0]["alone"]:
        for way in WAYS:
            ratios = sorted(turn[way][size] / turn["alone"][size] for turn in turns)
            taken = statistics.median(turn[way][size] for turn in turns)
            spread = ratios[0], statistics.median(ratios), ratios[-1]
            rows.append({
                "size": size,
                "way": way,
                "milliseconds": round(taken, 2),
                "ratio": [round(ratio, 2) for ratio in spread],
            })  # fmt: skip
    return rows


def machine_of(device: str) -> str:
    """What the steps are run on."""
    import torch

    if device == "cuda":
        return str(torch.cuda.get_device_name())
    about = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", about.read_text()) if about.exists() else None
    return named[1] if named else platform.machine()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=tuple(SIZES), nargs="?", default="cpu")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--empty", action="store_true", help="with --once: below an empty mode")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    parser.add_argument("--out", type=Path, help="write the figures there")
    asked = parser.parse_args()
    if asked.once:
        with empty_mode() if asked.empty else contextlib.nullcontext():
            shown = {str(s): step_milliseconds(asked.device, s) for s in SIZES[asked.device]}
        print(json.dumps(shown))
        return
    rows = compare(asked.device, asked.pairs)
    for row in rows:
        least, median, most = row["ratio"]
        taken = f"{row['milliseconds']:9.2f} ms {median:6.2f} x ({least:.2f} to {most:.2f})"
        print(f"{row['size']:22} {row['way']:16} {taken}")
    if asked.out is not None:
        import torch

        told = {"date": str(date.today()), "device": asked.device, "torch": torch.__version__}
        told |= {"machine": machine_of(asked.device), "turns": asked.pairs, "rows": rows}
        asked.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
