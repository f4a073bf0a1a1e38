"""Thousands of requests of which a third is left by its client, beside readers that hardly read.

Counts blocks of the KV cache that are not given back, and how memory of server and worker grows. It
is read before the first request that counts and after each tenth of them, whenever nothing runs.
Requests before that warm up: they fill what has a bound, such as the requests that the server
remembers, the KV cache, and the plans of all shapes. Then measures what slow readers cost the
others. Writes benchmarks/results/serve_soak.json.

    python benchmarks/serve_soak.py [model.gguf]
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from serve_process import free_port, own_command, running

ROOT = Path(__file__).parent.parent
ADMIN = {"Authorization": "Bearer soak"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=10_000, help="requests that do not count")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/serve_soak.json")
    options = parser.parse_args()
    port = free_port()
    words = ["--admin-key", "soak", "-np", str(options.streams)]
    with running(own_command(options.model, port, *words), port) as server:
        report = {
            "soak": _soak(port, server, options),
            "slow_readers": _slow_readers(port, options),
        }
    print(json.dumps(report, indent=1))
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _soak(port: int, server: int, options: argparse.Namespace) -> dict[str, Any]:
    pids = {"server": server, "worker": _debug(port)["worker_pid"]}
    tally = _Tally()
    _ask_all(port, range(options.requests, options.requests + options.warm_up), options, tally)
    tally.num_left = 0
    sizes = [_sizes(port, pids)]
    began = time.perf_counter()
    for tenth in range(10):
        numbers = range(options.requests * tenth // 10, options.requests * (tenth + 1) // 10)
        _ask_all(port, numbers, options, tally)
        sizes.append(_sizes(port, pids))
    seconds = time.perf_counter() - began
    state = _wait_idle(port)
    first, last = sizes[0], sizes[-1]
    return {
        "num_requests": options.requests,
        "num_warm_up": options.warm_up,
        "num_left": tally.num_left,
        "num_errors": len(tally.errors),
        "first_error": tally.errors[0] if tally.errors else "",
        "blocks_not_given_back": state["num_blocks"] - state["engine"]["num_free_blocks"],
        "restarts": state["restarts"],
        "resident_kib": sizes,
        "growth": {name: last[name] / first[name] - 1 for name in first},
        "seconds": seconds,
    }


@dataclass
class _Tally:
    """What became of the requests; filled by all threads."""

    num_left: int = 0
    errors: list[str] = field(default_factory=list)


def _ask_all(port: int, numbers: range, options: argparse.Namespace, tally: _Tally) -> None:
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in numbers:
        waiting.put(number)

    def work() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            chosen = random.Random(number)
            try:
                if chosen.random() < 1 / 3:
                    tally.num_left += 1
                    _leave(port, chosen)
                else:
                    _ask_whole(port, chosen)
            except (OSError, AssertionError, http.client.HTTPException) as error:
                tally.errors.append(f"{number}: {error!r}")

    _together(work, options.streams)


def _sizes(port: int, pids: dict[str, int]) -> dict[str, int]:
    _wait_idle(port)
    return {name: _resident_kib(pid) for name, pid in pids.items()}


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


if __name__ == "__main__":
    sys.exit(main())
