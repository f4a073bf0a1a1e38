"""Thousands of requests of which a third is left by its client, beside readers that hardly read.

Counts blocks of the KV cache that are not given back, and how the memory of server and worker grows
from the first tenth of the requests to the last. Then measures what slow readers cost the others.
Writes benchmarks/results/serve_soak.json.

    python benchmarks/serve_soak.py [model.gguf]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ROOT = Path(__file__).parent.parent
ADMIN = {"Authorization": "Bearer soak"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--readers", type=int, default=200)
    options = parser.parse_args()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    command = [sys.executable, "-m", "hypocenter", "serve", *filter(None, [options.model])]
    command += ["-q", "--port", str(port), "--admin-key", "soak", "-np", str(options.streams)]
    server = subprocess.Popen([*command, "--bundles", ""])
    try:
        while not _answers(port):
            assert server.poll() is None, "the server ended"
            time.sleep(0.1)
        report = {
            "soak": _soak(port, server.pid, options),
            "slow_readers": _slow_readers(port, options),
        }
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(report, indent=1))
    path = ROOT / "benchmarks/results/serve_soak.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _soak(port: int, server: int, options: argparse.Namespace) -> dict[str, Any]:
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in range(options.requests):
        waiting.put(number)
    errors: list[str] = []
    num_left = [0]
    pids = {"server": server, "worker": _debug(port)["worker_pid"]}
    sizes: list[dict[str, int]] = []

    def work() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            if number % (options.requests // 10) == options.requests // 20:
                sizes.append({name: _resident_kib(pid) for name, pid in pids.items()})
            chosen = random.Random(number)
            try:
                if chosen.random() < 1 / 3:
                    num_left[0] += 1
                    _leave(port, chosen)
                else:
                    _ask_whole(port, chosen)
            except (OSError, AssertionError, http.client.HTTPException) as error:
                errors.append(f"{number}: {error!r}")

    began = time.perf_counter()
    _together(work, options.streams)
    state = _wait_idle(port)
    first, last = sizes[0], sizes[-1]
    return {
        "num_requests": options.requests,
        "num_left": num_left[0],
        "num_errors": len(errors),
        "first_error": errors[0] if errors else "",
        "blocks_not_given_back": state["num_blocks"] - state["engine"]["num_free_blocks"],
        "restarts": state["restarts"],
        "resident_kib": sizes,
        "growth": {name: last[name] / first[name] - 1 for name in first},
        "seconds": time.perf_counter() - began,
    }


def _slow_readers(port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a request alone, and beside readers that take a byte a second."""
    alone = [_seconds(port) for _ in range(30)]
    is_over = threading.Event()

    def read_slowly() -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            body = json.dumps({"prompt": "import ", "max_tokens": 64, "stream": True}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            while not is_over.is_set() and connection.recv(1):
                is_over.wait(1.0)

    threads = [threading.Thread(target=read_slowly) for _ in range(options.readers)]
    for thread in threads:
        thread.start()
    time.sleep(10.0)  # what they asked for is computed by then
    beside = [_seconds(port) for _ in range(30)]
    is_over.set()
    for thread in threads:
        thread.join()
    return {
        "num_readers": options.readers,
        "alone_seconds": statistics.median(alone),
        "beside_seconds": statistics.median(beside),
        "ratio": statistics.median(beside) / statistics.median(alone),
    }


def _seconds(port: int) -> float:
    began = time.perf_counter()
    _ask_whole(port, random.Random(1), num_tokens=32)
    return time.perf_counter() - began


def _ask_whole(port: int, chosen: random.Random, num_tokens: int | None = None) -> None:
    num_tokens = num_tokens or chosen.randrange(1, 33)
    body = {
        "prompt": f"x{chosen.randrange(1000)} = ", "max_tokens": num_tokens, "ignore_eos": True,
    }  # fmt: skip
    connection = _post(port, body)
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    assert answer.status == 200, found
    assert found["usage"]["completion_tokens"] == num_tokens, found


def _leave(port: int, chosen: random.Random) -> None:
    """Ask for much, and go: before the answer, in the middle of it, or by its route."""
    body = {"prompt": "def f(" * chosen.randrange(1, 40), "max_tokens": 300, "stream": True}
    connection = _post(port, body)
    way = chosen.randrange(3)
    if way > 0:
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        for _ in range(chosen.randrange(1, 20)):
            line = answer.readline()
        if way == 2 and line.startswith(b"data: {"):
            name = json.loads(line[6:])["id"]
            other = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            other.request("POST", f"/v1/requests/{name}/cancel", "{}")
            other.getresponse().read()
            other.close()
    connection.close()


def _post(port: int, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection


def _together(work: Callable[[], None], num: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _debug(port: int) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/debug/requests", headers=ADMIN)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _wait_idle(port: int) -> dict[str, Any]:
    stop = time.monotonic() + 60
    while True:
        # What the engine says of itself comes with its news, so it is given some.
        _ask_whole(port, random.Random(2), num_tokens=1)
        state = _debug(port)
        if not state["open"] and not state["engine"]["num_running"]:
            return state
        assert time.monotonic() < stop, state
        time.sleep(0.1)


def _resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    return 0


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


if __name__ == "__main__":
    sys.exit(main())
