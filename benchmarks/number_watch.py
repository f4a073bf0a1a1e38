"""What a run with `--nan` costs: the time of training steps, to be run as it is and watched.

    python benchmarks/number_watch.py [cpu|cuda]

prints the median milliseconds of a step for each size. `--pair` runs itself both ways in turn, and
prints the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

STARTUP = Path(__file__).resolve().parent.parent / "src" / "hypocenter" / "foreign" / "startup"
#: Width, tokens, sequences, layers; on a CPU and on a GPU.
SIZES = {"cpu": ((128, 64, 4, 12),), "cuda": ((256, 128, 4, 12), (1024, 512, 16, 12))}
NUM_STEPS, NUM_PAIRS = 12, 3


def step_milliseconds(device: str, size: tuple[int, int, int, int]) -> float:
    """The median over the steps of a transformer with AdamW and, on a GPU, autocast."""
    import torch

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
        begun = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(x, mask=mask).float().square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        loss.item()
        taken.append(time.perf_counter() - begun)
    return 1000 * statistics.median(taken[2:])


def run_once(device: str, *, watched: bool) -> dict[str, float]:
    """The steps in a process of their own."""
    environment = dict(os.environ)
    if watched:
        paths = (str(STARTUP), environment.get("PYTHONPATH", ""))
        environment |= {"HYPO_NAN": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, __file__, device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", choices=tuple(SIZES), nargs="?", default="cpu")
    parser.add_argument("--pair", action="store_true")
    parser.add_argument("--pairs", type=int, default=NUM_PAIRS)
    asked = parser.parse_args()
    if not asked.pair:
        shown = {str(s): step_milliseconds(asked.device, s) for s in SIZES[asked.device]}
        print(json.dumps(shown))
        return
    for _ in range(asked.pairs):
        plain = run_once(asked.device, watched=False)
        watched = run_once(asked.device, watched=True)
        for size, milliseconds in plain.items():
            ratio = watched[size] / milliseconds
            print(f"{size}: {milliseconds:.2f} ms, watched {watched[size]:.2f} ms, {ratio:.2f} x")


if __name__ == "__main__":
    main()
