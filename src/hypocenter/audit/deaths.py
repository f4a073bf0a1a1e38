"""The gate of a death: what a process answers, and what the next one does after that was killed.

On a CPU the second one finds blocks of the cache that the first one left in shared memory.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from hypocenter.audit.compare import AuditedRun
from hypocenter.audit.equivalence import OwnGates
from hypocenter.audit.gates import Gate
from hypocenter.audit.life import ANSWERED, LifeOrder, read_answer
from hypocenter.base.errors import HypoError
from hypocenter.base.package import module_command
from hypocenter.settings.config import EngineConfig
from hypocenter.verify.outcome import Stage

_MODULE = "hypocenter.audit.life"
_MAX_SECONDS = 300.0
_MAX_SAID = 300


def death(path: str, config: EngineConfig, own: OwnGates) -> Stage:
    """One process is killed while it works, and another one answers the same request."""

    def pairs() -> Iterator[tuple[AuditedRun, AuditedRun]]:
        with tempfile.TemporaryDirectory(prefix="hypo-audit-") as folder:
            memory = Path(folder) / "blocks"
            memory.touch(mode=0o600)
            shared = str(memory) if config.device == "cpu" else ""
            # With a prefix cache the second one may read what the first one has computed.
            life = LifeOrder(
                path, replace(config, prefix_cache=True), own.sizes, shared, "", "", False
            )
            _live(life, Path(folder) / "before", goes_on=True)
            _live(life, Path(folder) / "after", goes_on=False)
            sizes, ways = own.sizes, own.ways
            length = sizes.asked + (sizes.answered - 1 if ways.writes else 0)
            asked = {**ways.asked, "length": length}
            before, after = (
                read_answer(Path(folder) / name, asked) for name in ("before", "after")
            )
            yield before, after

    asks = "does the next process answer as the one did that was killed?"
    return Gate("death", asks, "processes", pairs).run()


def _live(life: LifeOrder, out: Path, *, goes_on: bool) -> None:
    """Have a process write its answer to `out`; one that goes on is killed while it works. Raises
    HypoError."""
    life = msgspec.structs.replace(life, out=str(out), name=out.name, goes_on=goes_on)
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            module_command(_MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(life) + b"\n")
            process.stdin.close()
            line = process.stdout.readline().decode(errors="replace").strip()
            if line == ANSWERED and goes_on:
                process.send_signal(signal.SIGKILL)
            code = process.wait(_MAX_SECONDS)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        wanted = -signal.SIGKILL if goes_on else 0
        if line != ANSWERED or code != wanted:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-1:]
            why = "".join(last)[:_MAX_SAID]
            raise HypoError(f"the process {out.name} the death ended with {code}: {why}")
