"""Switching back to a model of a folder that was loaded 30 seconds ago, beside its first load.

A folder gets so many copies of a model, and a server one place for a loaded one. Each is asked in
turn, so that its file, packed weights and compiled kernels are in the page cache. The load after
that is what counts. Then some are asked again, each at least so many seconds after it was there.
Writes benchmarks/results/switch_models.json.

    python benchmarks/switch_models.py [model.gguf]

The goal is a median of at most 1.2.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from serve_process import free_port, own_command, running

from hypocenter.base.package import bundled_model

ROOT = Path(__file__).parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="else the bundled model")
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--back", type=int, default=6, help="switches that are measured")
    parser.add_argument("--away", type=float, default=30.0, help="seconds that it was not there")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/switch_models.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        names = [f"m{number:02d}" for number in range(options.models)]
        for name in names:
            shutil.copyfile(options.model or bundled_model(), Path(made) / f"{name}.gguf")
        port = free_port()
        words = ("--models-dir", made, "--models-max", "1", "--device", "cpu", "-c", "512")
        with running(own_command(None, port, *words), port):
            for name in names:  # packs its weights, and compiles what all need
                _asked(port, name)
            loads = {name: _asked(port, name) for name in names}
            left = {name: time.monotonic() for name in names}
            back = {}
            for name in names[: options.back]:
                time.sleep(max(0.0, left[name] + options.away - time.monotonic()))
                back[name] = _asked(port, name)
    shares = [back[name] / loads[name] for name in back]
    report = {
        "machine": platform.machine(),
        "num_models": options.models,
        "load_seconds": round(statistics.median(loads.values()), 3),
        "back_seconds": round(statistics.median(back.values()), 3),
        "share": round(statistics.median(shares), 3),
        "shares": [round(share, 3) for share in shares],
    }
    print(json.dumps(report, indent=1))
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _asked(port: int, name: str) -> float:
    """Seconds until a model that is not loaded has given one token."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"model": name, "prompt": "def f", "max_tokens": 1, "temperature": 0}
    began = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{name}: status {answer.status}: {answer.read(500)!r}")
    answer.read()
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
