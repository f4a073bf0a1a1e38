"""Runs many hostile inputs, one by one, and keeps the first that is not answered as it must be.

Holds no input of its own: `tests/fuzz/hostile_*.py` make them, each of one kind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from hypocenter.base.errors import EXIT_ERROR, EXIT_FAULT, EXIT_GATE, EXIT_OK, EXIT_USAGE
from outside.terminal import hypo_in_process

MAX_SECONDS = 30
MAX_MEMORY_BYTES = 4 << 30
MAX_PRINTED_BYTES = 32 << 20
EXIT_CODES = {EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_FAULT, EXIT_GATE}
#: Words of ours for what should not have happened.
DEFECTS = ("a defect", "Traceback", "MemoryError", "report it")


class TooSlow(BaseException):
    """An answer that takes longer than MAX_SECONDS; no `except Exception` holds it up."""


@contextlib.contextmanager
def limited_time(seconds: int = MAX_SECONDS) -> Iterator[None]:
    """Raises TooSlow within what takes longer."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer_problem(*command: str, stdin: str = "", raw_stdout: bool = False) -> str:
    """What is wrong with the answer of `hypo COMMAND`; nothing when all is well.

    `raw_stdout`: it shows what a model generates, which goes out as it is.
    """
    words = " ".join(command)[:200]
    try:
        with limited_time():
            done = hypo_in_process(*command, stdin=stdin)
    except TooSlow:
        return f"{words}: more than {MAX_SECONDS} s"
    if done.returncode not in EXIT_CODES:
        return f"{words}: exit code {done.returncode}"
    said = done.stderr if raw_stdout else done.stdout + done.stderr
    if len(said) > MAX_PRINTED_BYTES:
        return f"{words}: prints {len(said)} characters"
    if wrong := [c for c in said if not c.isprintable() and c != "\n"]:
        return f"{words}: prints {wrong[:5]!r}"
    for sentence in DEFECTS:
        if sentence in said:
            return f"{words}: {next(line for line in said.splitlines() if sentence in line)}"
    asks_for_help = {"--help", "-h", "--version", "-V", "help"} & set(command)
    if "--json" in command and done.stdout and not asks_for_help:
        try:
            json.loads(done.stdout)
        except ValueError as error:
            return f"{words}: no JSON: {error}"
    return ""


def run_trials(
    name: str, description: str, prepare: Callable[[Path], Callable[[random.Random, Path], str]]
) -> None:
    """Try `--count` inputs, from `--seed` on; leaves with 1 at the first that fails.

    `prepare` gets a folder to keep seeds in and gives the trial. A trial gets its randomness and an
    empty folder for its input, and says what was wrong. The folder of a bad one is kept.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz") / name.replace(" ", "-"))
    asked = parser.parse_args()
    out: Path = asked.out.absolute()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    num_bad, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        trial = prepare(Path(temporary))
        folder = Path(temporary) / "hostile"
        for number in range(asked.seed, asked.seed + asked.count):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            if wrong := trial(random.Random(number), folder):
                num_bad += 1
                print(f"{name} {number}: {wrong}", flush=True)
                if not asked.keep_going:
                    shutil.rmtree(out, ignore_errors=True)
                    shutil.copytree(folder, out, symlinks=True)
                    sys.exit(1)
            if number % 1000 == 0:
                print(f"hostile {name}: {number}", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    print(f"{asked.count} hostile {name}, {num_bad} findings, {seconds:.0f} s", flush=True)
    sys.exit(num_bad > 0)
