"""Switching back to a model of a folder that was there 30 seconds ago, beside its load alone.

A folder gets so many copies of a model, and a server one place for a loaded one. Each is asked
once, so that its file, packed weights and compiled kernels are in the page cache. Then some are
asked twice: while no model is loaded, which is a load, and later while another one is, which has to
go first. Both take until one token is there. That later is at least so many seconds after it had
to go. Writes benchmarks/results/switch_models.json.

    python benchmarks/switch_models.py [model.gguf]

The goal is a median of at most 1.2 of the shares, each of one model. On two busy cores it takes
four minutes.
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
from typing import Any

from serve_process import free_port, own_command, running

from hypocenter.base.package import bundled_model

ROOT = Path(__file__).parent.parent
_BOSS = "boss"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="else the bundled model")
    parser.add_argument("--models", type=int, default=16, help="more than --back")
    parser.add_argument("--back", type=int, default=6, help="models that are measured")
    parser.add_argument("--away", type=float, default=30.0, help="seconds that it was not there")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/switch_models.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        names = [f"m{number:02d}" for number in range(options.models)]
        for name in names:
            shutil.copyfile(options.model or bundled_model(), Path(made) / f"{name}.gguf")
        port = free_port()
        words = (
            *("--models-dir", made, "--models-max", "1", "--admin-key", _BOSS),
            *("--device", "cpu", "-c", "512"),
        )
        some = names[: options.back]
        loads, back, left = dict[str, float](), dict[str, float](), dict[str, float]()
        with running(own_command(None, port, *words), port):
            for name in names:  # packs its weights, and compiles what all need
                _asked(port, name)
            _unload(port, names[-1])
            for name in some:
                loads[name] = _asked(port, name)
                _unload(port, name)
                left[name] = time.monotonic()
            _asked(port, names[-1])
            for name in some:
                time.sleep(max(0.0, left[name] + options.away - time.monotonic()))
                back[name] = _asked(port, name)
    shares = [back[name] / loads[name] for name in some]
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
    began = time.monotonic()
    body = {"model": name, "prompt": "def f", "max_tokens": 1, "temperature": 0}
    _post(port, "/v1/completions", body)
    return time.monotonic() - began


def _unload(port: int, name: str) -> None:
    _post(port, "/models/unload", {"model": name})


def _post(port: int, path: str, body: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {_BOSS}"})
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path} {body['model']}: status {answer.status}: {said[:500]!r}")


if __name__ == "__main__":
    sys.exit(main())
