"""The gate of a death: what a process answers, and what the next one does after that was killed.

On a CPU the second one finds blocks of the cache that the first one left in shared memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.equivalence import OwnGates
from hypocenter.audit.executed import CannotRun
from hypocenter.audit.gates import Gate
from hypocenter.audit.life import LifeOrder, LifeWord, read_answer
from hypocenter.base.errors import HypoError
from hypocenter.base.own_folder import own_folder
from hypocenter.base.package import module_command
from hypocenter.settings.config import EngineConfig
from hypocenter.verify.outcome import Stage, Uncovered

MODULE = "hypocenter.audit.life"
MAX_SECONDS = 300.0
_MAX_SAID = 300


def death(path: str, config: EngineConfig, own: OwnGates, *, keeps_blocks: bool) -> Stage:
    """One process is killed while it works, and another one answers the same request. With
    `keeps_blocks` that one reads, on a CPU, what the first has left in the cache."""
    sizes, ways = own.sizes, own.ways
    size = ways.runner.block_size
    # The last token of a prompt is computed in any case.
    num_kept = (sizes.asked - 1) // size * size if keeps_blocks else 0
    uncovered = []
    why = _why_no_blocks(config, own, num_kept) if keeps_blocks else "the prefix cache is off"
    if why:
        uncovered.append(Uncovered("blocks of the cache that outlive a process", why))
        num_kept = 0

    def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
        with own_folder("hypo-audit-") as folder:
            memory = folder / "blocks"
            memory.touch(mode=0o600)
            order = LifeOrder(
                path,
                replace(config, prefix_cache=keeps_blocks),
                sizes,
                str(memory) if num_kept else "",
                out="",
                name="",
                goes_on=False,
                parent=os.getpid(),
            )
            live(order, folder / "before", goes_on=True)
            live(order, folder / "after", goes_on=False)
            yield (
                read_answer(folder / "before", _terms(own, 0)),
                read_answer(folder / "after", _terms(own, num_kept)),
            )

    asks = "does the next process answer as the one did that was killed?"
    return Gate("death", asks, "processes", pairs, uncovered=tuple(uncovered)).run()


def _terms(own: OwnGates, num_kept: int) -> dict[str, Any]:
    """How a process is to answer that finds so many tokens of the prompt computed."""
    sizes, ways = own.sizes, own.ways
    num_chosen = sizes.answered - 1 if ways.writes else 0
    chunks = (sizes.asked - num_kept, *[1] * num_chosen)
    return {**ways.asked, "length": sizes.asked + num_chosen, "chunks": chunks}


def _why_no_blocks(config: EngineConfig, own: OwnGates, num_kept: int) -> str:
    """Why no block is found by the second process; empty where it is to find some."""
    if config.device != "cpu":
        return f"those of {config.device} end with their process"
    arch = own.ways.runner.arch
    if not own.ways.writes or arch.state_layers or not arch.attention_layers:
        return "this model keeps none for others"
    return "" if num_kept else "the prompt fills none that are kept"


def live(order: LifeOrder, out: Path, *, goes_on: bool) -> None:
    """Have a process write its answer to `out`; one that goes on is killed while it works.

    Raises CannotRun where it could not be had, and HypoError where only the second one ended.
    """
    order = msgspec.structs.replace(order, out=str(out), name=out.name, goes_on=goes_on)
    # Nobody is to hear of a process that was killed on purpose.
    environment = {**os.environ, "HYPO_RUN_DIR": str(out.with_name("runs"))}
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                module_command(MODULE),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
            )
        except OSError as error:
            raise CannotRun(f"no process can be started: {error}") from error
        deadline = threading.Timer(MAX_SECONDS, process.kill)
        deadline.start()
        try:
            line = _first_line(process, msgspec.json.encode(order) + b"\n")
            if line and goes_on:
                process.send_signal(signal.SIGKILL)
            code = process.wait()
        finally:
            is_late = not deadline.is_alive()
            deadline.cancel()
            process.kill()
            process.wait()
        if line and (cannot := msgspec.json.decode(line, type=LifeWord).cannot):
            raise CannotRun(cannot)
        if line and code == (-signal.SIGKILL if goes_on else 0):
            return
        if is_late:
            raise CannotRun(f"the process {out.name} the death took more than {MAX_SECONDS:.0f} s")
        said.seek(0)
        last = said.read().decode(errors="replace").strip().splitlines()[-1:]
        why = f"the process {out.name} the death ended with {code}: {''.join(last)[:_MAX_SAID]}"
        raise CannotRun(why) if goes_on else HypoError(why)


def _first_line(process: subprocess.Popen[bytes], order: bytes) -> bytes:
    """What a process says to an order; empty where it ended before."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout, contextlib.suppress(BrokenPipeError):
        with process.stdin:
            process.stdin.write(order)
        return process.stdout.readline()
    return b""
