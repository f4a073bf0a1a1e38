"""From outside: what streams of `hypo serve` wait when its worker is killed, part by part.

It starts a server, opens streams, waits until another worker stands by, and kills the one that
answers. Of each death it tells: when the server had noticed, when another was ready, what the
streams paused, and how long until the next one stood by.

    python benchmarks/worker_death.py model.gguf --device cuda --kills 6
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from large_gguf import write_8b

PORT, KEY = 18474, "benchmark-key"
START_SECONDS = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=600, help="of each answer")
    parser.add_argument("--serve", default="", help="further words for hypo serve")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="worker-death-") as folder:
        model = Path(options.model or Path(folder) / "model-8b.gguf")
        if not options.model:
            write_8b(model)
        print(json.dumps(measure(model, options), indent=1), flush=True)
    return 0


def measure(model: Path, options: Any) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "hypocenter", "serve", str(model), "--device", options.device,
        "-np", str(options.streams), "--port", str(PORT), *options.serve.split(),
    ]  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        environ = {**os.environ, "HYPO_ADMIN_KEY": KEY}
        server = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            _until(server, lambda: _get("/ready")[0] == 200)
            ready_seconds = round(time.monotonic() - began, 2)
            _until(server, lambda: _state()["spare_state"] != "loading")
            stood_by_seconds = round(time.monotonic() - began, 2)
            over = threading.Event()
            streams = [_Stream(number, over, options) for number in range(options.streams)]
            deaths = [_kill(server, streams) for _ in range(options.kills)]
            over.set()
            for stream in streams:
                stream.join()
        finally:
            server.terminate()
            server.wait(30)
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            told = [line for line in lines if " GET /" not in line and " POST " not in line]
            print("\n".join(told[:80]), flush=True)
    pauses = sorted(pause for death in deaths for pause in death.pop("all"))
    return {
        "ready_seconds": ready_seconds,
        "stood_by_seconds": stood_by_seconds,
        "num_streams": options.streams,
        "num_pauses": len(pauses),
        "median_pause_seconds": round(statistics.median(pauses), 3),
        "p99_pause_seconds": round(pauses[int(0.99 * (len(pauses) - 1))], 3),
        "max_pause_seconds": round(pauses[-1], 3),
        "wrong_streams": sum(stream.num_wrong for stream in streams),
        "deaths": deaths,
    }


class _Stream(threading.Thread):
    """Asks the same of the server over and over; each answer must be the first one again."""

    def __init__(self, number: int, over: threading.Event, options: Any) -> None:
        super().__init__(daemon=True)
        self._body = {
            "prompt": [300 + (number * 7919 + 31 * place) % 600 for place in range(options.prompt)],
            "max_tokens": options.tokens, "stream": True, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        self._over = over
        self.times: list[float] = []
        self.num_wrong = 0
        self.start()

    def run(self) -> None:
        expected = ""
        while not self._over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
            connection.request("POST", "/v1/completions", json.dumps(self._body))
            text, is_whole = "", False
            for line in connection.getresponse():
                if line.startswith(b"data: [DONE]"):
                    is_whole = True
                elif line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "choices" not in event:
                        continue
                    self.times.append(time.monotonic())
                    text += "".join(choice["text"] for choice in event["choices"])
            expected = expected or text
            self.num_wrong += not is_whole or text != expected


def _kill(server: subprocess.Popen[bytes], streams: list[_Stream]) -> dict[str, Any]:
    """Kill the worker once all streams have moved on, and see what they pause."""
    _until(server, lambda: _state()["spare_state"] != "loading")
    now = time.monotonic()
    _until(server, lambda: all(stream.times and stream.times[-1] > now for stream in streams))
    time.sleep(0.7)
    pid = _state()["worker_pid"]
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _until(server, lambda: _state()["worker_pid"] != pid)
    noticed = time.monotonic() - at
    _until(server, lambda: _state()["worker_pid"] is not None and _get("/ready")[0] == 200)
    ready = time.monotonic() - at
    _until(server, lambda: all(stream.times[-1] > at + ready for stream in streams))
    pauses = [_longest_gap(stream.times, at, at + ready) for stream in streams]
    _until(server, lambda: _state()["spare_state"] in ("standing by", "without a model"))
    return {
        "noticed_seconds": round(noticed, 3),
        "ready_seconds": round(ready, 3),
        "median_pause_seconds": round(statistics.median(pauses), 3),
        "max_pause_seconds": round(max(pauses), 3),
        "next_stands_by_seconds": round(time.monotonic() - at, 2),
        "all": pauses,
    }


def _longest_gap(times: list[float], begin: float, end: float) -> float:
    """Between two pieces of which the second came after `begin`, up to the first after `end`."""
    gaps = []
    for before, after in itertools.pairwise(times):
        if after > begin:
            gaps.append(after - before)
        if after > end:
            break
    return max(gaps)


def _get(path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
    connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def _state() -> dict[str, Any]:
    state: dict[str, Any] = json.loads(_get("/debug/requests")[1])
    return state


def _until(server: subprocess.Popen[bytes], holds: Any, seconds: float = 0.005) -> None:
    stop = time.monotonic() + START_SECONDS
    while time.monotonic() < stop:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            if holds():
                return
        except OSError:
            pass
        time.sleep(seconds)
    raise SystemExit("waited in vain")


if __name__ == "__main__":
    sys.exit(main())
