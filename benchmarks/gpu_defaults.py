"""What commands that name no device do on a machine with a GPU, and what their KV cache takes.

    python benchmarks/gpu_defaults.py                  needs one GPU and 5 GB of disk

Used memory is what nvidia-smi says. Prints a table and writes JSON to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/support"), str(ROOT / "src")]
FRACTIONS = (0.9, 0.5)
COMMAND_SECONDS = 200
#: Requests at once and tokens of each, as prompt and answer.
NUM_REQUESTS, PROMPT, ANSWER = 32, 42, 128
_BATCH = f"""
import sys, time
from hypocenter import LLM
path, kv_tokens = sys.argv[1], int(sys.argv[2]) or None
with LLM(path, kv_tokens=kv_tokens, max_batch_requests={NUM_REQUESTS}) as llm:
    prompts = [[300 + i] * {PROMPT} for i in range({NUM_REQUESTS})]
    options = dict(max_tokens={ANSWER}, ignore_eos=True)
    llm.generate(prompts, **options)
    seconds = []
    for number in range(3):
        prompts = [[400 + 40 * number + i] * {PROMPT} for i in range({NUM_REQUESTS})]
        began = time.perf_counter()
        answers = llm.generate(prompts, **options)
        seconds.append(time.perf_counter() - began)
        assert all(len(answer.token_ids) == {ANSWER} for answer in answers)
    runner = llm.engine.runner
    print(llm.route().device, runner.num_blocks * runner.block_size, min(seconds))
"""


def main() -> int:
    options = _options()
    from vs_blocks import made_of_blocks
    from vs_models import SHAPES

    path = made_of_blocks(SHAPES[options.shape], options.type, options.models)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "card": _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"),
        "model": f"{options.shape} {options.type}",
        "choices": _choices(path),
        "caches": [_cache(path, fraction) for fraction in FRACTIONS],
        "death": _death(path),
        "batches": [_batch(path, kv_tokens) for kv_tokens in (0, 4096)],
    }
    out = options.out or ROOT / f"benchmarks/results/defaults-{report['date']}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(_table(report))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _choices(path: Path) -> dict[str, str]:
    """The line that `hypo run` says of its device, by what the environment has."""
    cases: dict[str, dict[str, str]] = {
        "nothing set": {},
        "CUDA_VISIBLE_DEVICES=": {"CUDA_VISIBLE_DEVICES": ""},
        "HYPO_DEVICE=cpu": {"HYPO_DEVICE": "cpu"},
    }
    found = {}
    for name, variables in cases.items():
        model = str(path) if not variables else None  # the bundled one is quick on the CPU
        words = ["run", *filter(None, [model]), "-c", "256", "-p", "import os", "-n", "4"]
        done = _hypo(words, variables)
        lines = [line for line in done.stderr.splitlines() if "device" in line]
        found[name] = " / ".join(lines) or "no line"
    return found


def _cache(path: Path, fraction: float) -> dict[str, Any]:
    """`hypo serve` with that share of the memory: what it says, and what the driver counts."""
    from serve_process import free_port

    port = free_port()
    words = ["serve", str(path), "--port", str(port), "--bundles", ""]
    if fraction != FRACTIONS[0]:
        words += ["--gpu-memory-fraction", str(fraction)]
    before = _used_mib()
    with _server(words) as lines:
        told = [line for line in lines if line.strip().startswith(("hypo:   device", "device"))]
        used = _used_mib()
        answered = _answer(port)
    return {
        "fraction": fraction, "said": told, "used_mib_before": before, "used_mib": used,
        "total_mib": int(_output("nvidia-smi", "--query-gpu=memory.total",
                                 "--format=csv,noheader,nounits").split()[0]),
        "answered_tokens": answered,
    }  # fmt: skip


def _death(path: Path) -> dict[str, Any]:
    """The same answer before and after the worker is killed, whose memory the next one takes."""
    from serve_process import child_pids, free_port

    port = free_port()
    with _server(["serve", str(path), "--port", str(port), "--bundles", ""]) as lines:
        server = int(lines[0])
        before = _text(port)
        workers = [pid for pid in child_pids(server) if b"worker.worker" in _command(pid)]
        os.kill(min(workers), signal.SIGKILL)  # the others started later
        began = time.perf_counter()
        after = _text(port)
        seconds = time.perf_counter() - began
        return {"is_equal": before == after, "seconds": seconds, "used_mib": _used_mib()}


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextlib.contextmanager
def _server(words: list[str]) -> Any:
    """Its pid and the lines that a server has said once it serves; ended behind."""
    command = [sys.executable, "-P", "-m", "hypocenter", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = [str(process.pid)]
    try:
        stop = time.monotonic() + COMMAND_SECONDS
        for line in process.stderr:
            lines.append(line.rstrip())
            print(lines[-1], file=sys.stderr, flush=True)
            if "KV cache of" in line:
                break
            if time.monotonic() > stop:
                raise SystemExit(f"{command} does not serve")
        yield lines
    finally:
        process.terminate()
        process.wait()


def _answer(port: int) -> int:
    return int(_asked(port)["usage"]["completion_tokens"])


def _text(port: int) -> str:
    """An answer; what a server that is between two workers refuses is asked for again."""
    stop = time.monotonic() + COMMAND_SECONDS
    while True:
        try:
            return str(_asked(port)["choices"][0]["text"])
        except OSError:
            if time.monotonic() > stop:
                raise
            time.sleep(0.05)


def _asked(port: int) -> Any:
    import urllib.request

    body = {"prompt": [300] * 64, "max_tokens": 32, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=COMMAND_SECONDS) as answer:
        return json.load(answer)


def _batch(path: Path, kv_tokens: int) -> dict[str, Any]:
    """32 requests at once in Python, with the cache that comes by itself, or one context."""
    done = subprocess.run(
        [sys.executable, "-c", _BATCH, str(path), str(kv_tokens)],
        capture_output=True, text=True, timeout=COMMAND_SECONDS,
    )  # fmt: skip
    if done.returncode:
        return {"kv_tokens": kv_tokens, "failed": done.stderr[-2000:]}
    device, held, seconds = done.stdout.split()
    rate = NUM_REQUESTS * ANSWER / float(seconds)
    return {"asked": kv_tokens, "device": device, "kv_tokens": int(held), "tokens_per_s": rate}


def _hypo(words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "hypocenter", *words], capture_output=True, text=True,
        timeout=COMMAND_SECONDS, env=os.environ | variables,
    )  # fmt: skip
    print(words, variables, done.stderr[-2000:], file=sys.stderr, flush=True)
    return done


def _used_mib() -> int:
    fields = "--query-gpu=memory.used", "--format=csv,noheader,nounits"
    return int(_output("nvidia-smi", *fields).split()[0])


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['card']}, {report['model']}"]
    lines += [f"  {name:24} {said}" for name, said in report["choices"].items()]
    for row in report["caches"]:
        share = row["used_mib"] / row["total_mib"]
        lines.append(
            f"  fraction {row['fraction']}: {row['used_mib']} of {row['total_mib']} MiB used, "
            f"{share:.3f}; {row['said']}; answered {row['answered_tokens']}"
        )
    lines += [f"  {row}" for row in (report["death"], *report["batches"])]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
