"""Hostile bundles for `hypo doctor`, `diff` and `replay`; `scripts/test-fuzz` runs it.

Each input is a bundle of the lab with one to three of its numbers, texts or lists replaced by worse
ones. Every command must end by itself, in bounded time and memory, with an exit code of ours, and
print JSON that is JSON and text without control characters. The first input that fails is kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from terminal import hypo_in_process

#: Victims of the lab whose bundles are the seeds: rungs of every sort look at them.
VICTIMS = (
    "slot_beyond_cache", "foreign_block", "sentinel_block", "rope_base_zero", "missing_wait",
    "grid_product", "late_out_of_memory", "unowned_block",
)  # fmt: skip
MAX_SECONDS = 30
MAX_MEMORY_BYTES = 4 << 30
#: A replay runs kernels, so it takes a hundred times as long as reading does.
REPLAY_EVERY = 50
NUMBERS = (
    0, -1, 1, 2, 3, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**63, -(2**63), 2**64,
    2**70, 10**400, 0.5, -0.0, 1e308,
)  # fmt: skip
TEXTS = (
    "", "x", "\x1b]0;title\x07\x1b[2J", "\u202e\u2028\x9b\xa0\x7f", "a\nCAUSE forged\n# heading",
    "<script>alert(1)</script>", "![x](http://example.invalid)", "../../etc/passwd", "/dev/zero",
    "nan", "F32", "I32", "sim:mi300x", "cuda:0", "%s{0}", "[" * 200, "(" * 2000 + ")" * 2000,
    "x" * 70_000, "lambda: 0", "2**2**2**2**9", "rows * 10**9", "a if b else c", "\x00", "é漢🙂",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [0] * 17, {"a": 1})

Node = dict[str, Any] | list[Any]


class TooSlow(BaseException):
    """A command that takes longer than MAX_SECONDS; no `except Exception` holds it up."""


def places(node: Any) -> Iterator[tuple[Node, Any]]:
    """Every (container, key) below `node`."""
    items: Any = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    for key, value in items:
        yield node, key
        yield from places(value)


def spoil(bundle: Any, source: random.Random) -> str:
    """Replace one value; says which and with what."""
    kind = source.choice((int, int, int, str, str, list, dict))
    found = [(node, key) for node, key in places(bundle) if type(node[key]) is kind]
    if not found:
        return "nothing"
    # By the name of the field first: there are thousands of addresses, and one wavefront.
    names = sorted({_name(key) for _, key in found})
    name = source.choice(names)
    node, key = source.choice([place for place in found if _name(place[1]) == name])
    before = node[key]
    if source.random() < 0.1:
        node[key] = source.choice(OTHERS)
    elif kind is int:
        node[key] = source.choice((*NUMBERS, before + 1, before - 1, before * 2, -before))
    elif kind is str:
        node[key] = source.choice((*TEXTS, before + "x", before[1:], before.upper()))
    elif kind is list:
        node[key] = source.choice((before * 2, before[:1], before[::-1], before[1:], before * 50))
    else:
        node[key] = {k: v for k, v in before.items() if source.random() < 0.8}
    return f"{name}: {str(before)[:60]} -> {str(node[key])[:60]}"


def _name(key: Any) -> str:
    return key if isinstance(key, str) else "*"


def problem(folder: Path, seed: Path, number: int) -> str:
    """What is wrong with the answers to this bundle; nothing when all is well."""
    commands = [
        ("doctor", str(folder), "--json"), ("doctor", str(folder), "--all"),
        ("doctor", str(folder), "--markdown"), ("diff", str(seed), str(folder), "--json"),
        ("diff", str(folder), str(seed)),
    ]  # fmt: skip
    if number % REPLAY_EVERY == 0:
        commands.append(("replay", str(folder), "--budget", "5", "--json"))
    for command in commands if number % REPLAY_EVERY == 0 else commands[number % 5 :][:1]:
        words = " ".join(command[:1] + command[2:])
        signal.alarm(MAX_SECONDS)
        try:
            done = hypo_in_process(*command)
        except TooSlow:
            return f"{words}: more than {MAX_SECONDS} s"
        finally:
            signal.alarm(0)
        if done.returncode not in (0, 1, 2, 3, 4):
            return f"{words}: exit code {done.returncode}"
        said = done.stdout + done.stderr
        if wrong := [c for c in said if not c.isprintable() and c != "\n"]:
            return f"{words}: prints {wrong[:5]!r}"
        for sentence in ("a defect", "Traceback", "MemoryError", "report it"):
            if sentence in said:
                return f"{words}: {next(line for line in said.splitlines() if sentence in line)}"
        if "--json" in command and done.stdout:
            try:
                json.loads(done.stdout)
            except ValueError as error:
                return f"{words}: no JSON: {error}"
    return ""


def main() -> None:
    """Try `--count` inputs, from `--seed` on; leaves with 1 at the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz/bundle"))
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))

    def slow(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, slow)
    num_bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        seeds = []
        for victim in VICTIMS:
            seed = Path(temporary) / victim
            hypo_in_process("lab", "run", victim, "--out", str(seed))
            seeds.append(seed / "bundle")
        folder = Path(temporary) / "hostile"
        texts = {seed: (seed / "bundle.json").read_text() for seed in seeds}
        parsed = {seed: json.loads(text) for seed, text in texts.items()}
        for number in range(asked.seed, asked.seed + asked.count):
            source = random.Random(number)
            seed = source.choice(seeds)
            bundle = copy.deepcopy(parsed[seed])
            told = [spoil(bundle, source) for _ in range(source.choice((1, 1, 2, 3)))]
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(seed, folder)
            (folder / "bundle.json").write_text(json.dumps(bundle))
            if wrong := problem(folder, seed, number):
                num_bad += 1
                print(f"{number} ({seed.parent.name}; {'; '.join(told)}): {wrong}", flush=True)
                if not asked.keep_going:
                    shutil.rmtree(asked.out, ignore_errors=True)
                    shutil.copytree(folder, asked.out)
                    sys.exit(1)
            if number % 1000 == 0:
                print(f"hostile bundles: {number}", file=sys.stderr, flush=True)
    print(f"{asked.count} hostile bundles, {num_bad} findings", flush=True)
    sys.exit(num_bad > 0)


if __name__ == "__main__":
    main()
