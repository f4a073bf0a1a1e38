"""From outside: when `hypo serve` is ready on a GPU, what the first requests wait, and the gaps.

It starts a server twice, with an empty cache of compiled kernels and with the one that the first
left. Each time it tells: seconds to `/ready`, seconds to the first token of the first request and
of the next sixteen, and of many streams at once the rate and the gaps between pieces.

    python benchmarks/start_ready.py --device cuda              # makes an 8B's file first
    python benchmarks/start_ready.py model.gguf --streams 32
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from large_gguf import write_8b

PORT = 18473
START_SECONDS = 180.0
_WATCHED = ("hypocenter:compiled_after_ready_total", "hypocenter:worker_ready")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer under load")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt under load")
    parser.add_argument("--rounds", type=int, default=2, help="answers of each stream")
    parser.add_argument("--serve", default="", help="further words for hypo serve")
    parser.add_argument("--warm-only", action="store_true", help="the cache is as it is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="start-ready-") as folder:
        model = Path(options.model or Path(folder) / "model-8b.gguf")
        if not options.model:
            began = time.monotonic()
            write_8b(model)
            print(f"model written in {time.monotonic() - began:.1f} s", flush=True)
        cache = os.environ.get("TRITON_CACHE_DIR") or str(Path(folder) / "triton")
        names = ("warm",) if options.warm_only else ("cold", "warm")
        if not options.warm_only:
            shutil.rmtree(cache, ignore_errors=True)
        rows = {}
        for name in names:
            rows[name] = measure(model, options, {**os.environ, "TRITON_CACHE_DIR": cache})
            print(json.dumps({name: rows[name]}), flush=True)
    return 0


def measure(model: Path, options: Any, environ: dict[str, str]) -> dict[str, Any]:
    """One life of a server, and what its clients saw."""
    command = [
        sys.executable, "-m", "hypocenter", "serve", str(model), "--device", options.device,
        "-c", str(options.context), "-np", str(options.streams), "--port", str(PORT), "--no-spare",
        *options.serve.split(),
    ]  # fmt: skip
    found: dict[str, Any] = {}
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
        try:
            found["ready_seconds"] = _until_ready(server, began)
            found["first_token_seconds"] = round(_stream(5, 8, 0)[0], 4)
            with ThreadPoolExecutor(options.streams) as pool:
                sixteen = list(pool.map(lambda n: _stream(5 + 7 * n, 8, n)[0], range(16)))
                found["next_16_seconds"] = _spread(sixteen)
                found["forms"] = [_form(kind) for kind in _FORMS]
                at = time.monotonic()
                jobs = _jobs(options)
                answers = list(pool.map(lambda job: _stream(*job), jobs))
                seconds = time.monotonic() - at
            gaps = [gap for _, of_one in answers for gap in of_one]
            found["tokens_per_second"] = round(sum(job[1] for job in jobs) / seconds, 1)
            found["first_token_under_load"] = _spread([first for first, _ in answers])
            found["gaps"] = _spread(gaps)
            found["p99_over_median"] = round(found["gaps"]["p99"] / found["gaps"]["p50"], 2)
            found["metrics"] = _metrics()
        finally:
            server.terminate()
            server.wait(30)
            log.seek(0)
            lines = log.read().decode(errors="replace").splitlines()
            told = [line for line in lines if " GET /ready " not in line and " POST " not in line]
            print("\n".join(told[:40]), flush=True)
    return found


_FORMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"logprobs": 3, "repeat_penalty": 1.2},
    {"json_schema": {"type": "integer", "minimum": 0, "maximum": 9}},
    {"n": 4, "temperature": 1.0},
    {"logit_bias": {"300": 5}},
    {"echo": True, "logprobs": 1},
)


def _jobs(options: Any) -> list[tuple[int, int, int]]:
    """Tokens of prompt and answer, and a number, of each: of half to one and a half of the length.

    Were they alike, streams would end together, and their next prompts be read in one step.
    """
    chance = random.Random(0)

    def around(number: int) -> int:
        return max(round(number * chance.uniform(0.5, 1.5)), 1)

    num_answers = options.streams * options.rounds
    return [(around(options.prompt), around(options.tokens), n) for n in range(num_answers)]


def _form(fields: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a whole answer of another form than those before."""
    began = time.monotonic()
    status, _ = _post({"prompt": _prompt(40, 99), "max_tokens": 8, **fields})
    return {"fields": list(fields), "status": status, "seconds": round(time.monotonic() - began, 3)}


def _until_ready(server: subprocess.Popen[bytes], began: float) -> float:
    while time.monotonic() - began < START_SECONDS:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return round(time.monotonic() - began, 2)
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit("the server was never ready")


def _prompt(num_tokens: int, seed: int) -> list[int]:
    return [300 + (seed * 7919 + 31 * place) % 600 for place in range(num_tokens)]


def _post(body: dict[str, Any]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    return answer.status, answer.read()


def _stream(num_prompt: int, num_tokens: int, seed: int) -> tuple[float, list[float]]:
    """Seconds to the first piece, and the gaps between the following ones."""
    body = {
        "prompt": _prompt(num_prompt, seed), "max_tokens": num_tokens, "stream": True,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    began = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    times = [time.monotonic() for line in answer if line.startswith(b"data: {")]
    if not times:
        raise SystemExit(f"status {answer.status}")
    return times[0] - began, [b - a for a, b in itertools.pairwise(times)]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 4)

    return {
        "p50": round(statistics.median(ordered), 4), "p90": at(0.9), "p99": at(0.99),
        "max": round(ordered[-1], 4),
    }  # fmt: skip


def _metrics() -> dict[str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    lines = [line for line in text.splitlines() if line.startswith(_WATCHED)]
    return dict(line.rsplit(" ", 1) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
