"""A server under attack, two honest clients beside it, and the verdict of one round."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outside.served import Served, serving

from attack.aim import DEFECT
from attack.attacks import KEYS, Attack
from attack.limits import (
    ATTACK_SECONDS,
    BODY_BUDGET_BYTES,
    HEALTH_FLOOR_SECONDS,
    HEALTH_TIMES,
    LOG_LINES,
    MEMORY_BYTES,
    MORE_FILES,
    MORE_THREADS,
    SETTLE_SECONDS,
    TREE_BYTES,
    TTFT_FLOOR_SECONDS,
    TTFT_TIMES,
)
from attack.prober import Seen
from attack.process import TreeMemory, forget_peak, num_files, status

TESTS = Path(__file__).parents[1]
#: Where programs of this folder find each other.
PATH = os.pathsep.join(
    [
        str(TESTS.parent),
        str(TESTS),
        str(TESTS / "support"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)
VICTIM, MALLORY, BOSS = "victim-key", "mallory-key", "boss-key"
MANY_KEYS = tuple(f"key-{number}-of-many" for number in range(16))
#: Where no key says who asks, the address does: who has none comes from elsewhere.
HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
#: The bundled model has no template, and chats are to be attacked as well.
WORDS = ("--admin-key", BOSS, "--chat-template", "chatml")
_START_SECONDS = 3.0
#: What an attack that reached nothing has seen.
_NOTHING = {"rounds", "ConnectionRefusedError"}
_END_SECONDS = 30.0
#: What an attack's clients need to be where they want to be.
_POSITION_SECONDS = 0.5


@dataclass
class Row:
    """What one attack did. Seconds are of the slowest probe, bytes of the largest moment."""

    attack: str
    health_alone: float | None = None
    health_beside: float | None = None
    ttft_alone: float | None = None
    ttft_beside: float | None = None
    server_bytes: int | None = None
    tree_bytes: int | None = None
    seen: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return "held" if not self.problems else self.problems[0]


def run_program(*words: str) -> subprocess.Popen[str]:
    """A module of this folder in a process of its own, whose stdout is read at its end."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *words],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip


def ended(process: subprocess.Popen[str], seconds: float) -> str:
    """What a program has printed; one that takes longer is killed, and says nothing."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


@dataclass(frozen=True)
class Before:
    """How a server stood before an attack."""

    restarts: int
    num_files: int
    num_threads: int
    num_lines: int


@dataclass
class Arena:
    """A server; what honest clients see of it alone; and how it stood before the attack."""

    served: Served
    kind: str
    alone: Seen
    is_spoiled: bool = False

    @property
    def key(self) -> str:
        return VICTIM if self.kind == KEYS else ""

    @property
    def pid(self) -> int:
        return self.served.process.pid

    def state(self) -> Any:
        """What is open, by the server's own word."""
        headers = {"Authorization": f"Bearer {BOSS}"}
        return self.served.get("/debug/requests", headers=headers, timeout=5).json

    def before(self) -> Before:
        """How it stands now; the peak of its memory begins anew."""
        forget_peak(self.pid)
        return Before(
            self.state()["restarts"],
            num_files(self.pid),
            status(self.pid, "Threads"),
            len(self.served.stderr),
        )

    def look(self, seconds: float) -> Seen:
        """What honest clients see in so many seconds."""
        prober = run_program("attack.prober", str(self.served.port), self.key, str(seconds))
        said = ended(prober, seconds + 90)
        return Seen(**json.loads(said)) if said else Seen(wrong=["the prober did not end"])

    def round(self, attack: Attack) -> Row:
        """One attack, from before it to after it."""
        row = Row(attack.id, max(self.alone.health), ttft_alone=max(self.alone.ttft))
        before = self.before()
        with TreeMemory(self.pid) as memory:
            attacker = self._attack(attack)
            time.sleep(_POSITION_SECONDS)
            beside = self.look(ATTACK_SECONDS - _POSITION_SECONDS)
            said = ended(attacker, _END_SECONDS)
        row.seen = json.loads(said) if said else {"the attacker had to be killed": 1}
        row.tree_bytes = memory.peak
        self._judge_beside(row, beside)
        if attacker.returncode != 0 or DEFECT in row.seen or not row.seen.keys() - _NOTHING:
            row.problems.append(f"the attack itself failed: {row.seen}")
        self.judge_after(row, before)
        return row

    def judge_after(self, row: Row, before: Before) -> None:
        """What is left once the attacker is gone, and the server had time to be done with it.

        A server that an attack left marks on is ended: the next one needs another.
        """
        stop, left = time.monotonic() + SETTLE_SECONDS, ["the server did not answer"]
        while left and time.monotonic() < stop:
            time.sleep(0.1)
            with contextlib.suppress(OSError, ValueError):
                left = self._left(before)
        row.problems += left
        row.server_bytes = status(self.pid, "VmHWM")
        if row.server_bytes > MEMORY_BYTES + BODY_BUDGET_BYTES:
            row.problems.append(f"the server had {row.server_bytes >> 20} MiB")
        if row.tree_bytes is not None and row.tree_bytes > TREE_BYTES:
            row.problems.append(f"all processes had {row.tree_bytes >> 20} MiB")
        if self.served.process.poll() is not None:
            row.problems.append(f"the server ended: {self.served.process.returncode}")
        elif not left:
            row.problems += [f"afterwards: {one}" for one in self.look(0.5).wrong[:2]]
        self._judge_log(row, self.served.stderr[before.num_lines :])
        self.is_spoiled = bool(row.problems)
        if self.is_spoiled:
            self.served.process.kill()

    def _attack(self, attack: Attack) -> subprocess.Popen[str]:
        keys = ""
        if attack.server == KEYS and attack.has_key:
            keys = ",".join(MANY_KEYS) if attack.many_keys else MALLORY
        source = HERE if keys else ELSEWHERE
        words = (str(self.served.port), source, keys, str(attack.num), str(ATTACK_SECONDS))
        program = run_program("attack.program", attack.client, *words)
        assert program.stdout is not None
        program.stdout.readline()  # what it sends is made
        return program

    def _judge_beside(self, row: Row, beside: Seen) -> None:
        assert row.health_alone is not None
        assert row.ttft_alone is not None
        # Of what the prober itself was late nobody can blame the server.
        row.health_beside = max(max(beside.health, default=0.0) - beside.lag, 0.0)
        row.ttft_beside = max(max(beside.ttft, default=0.0) - beside.lag, 0.0)
        health = max(HEALTH_FLOOR_SECONDS, HEALTH_TIMES * row.health_alone)
        ttft = max(TTFT_FLOOR_SECONDS, TTFT_TIMES * row.ttft_alone)
        if row.health_beside > health:
            row.problems.append(f"/health took {row.health_beside:.2f} s")
        if row.ttft_beside > ttft:
            row.problems.append(f"the first token took {row.ttft_beside:.2f} s")
        row.problems += beside.wrong[:2]
        for prompt, texts in beside.answers.items():
            if set(texts) != set(self.alone.answers.get(prompt, texts)):
                row.problems.append(f"another answer: {texts!r}")

    def _left(self, before: Before) -> list[str]:
        now, found = self.state(), []
        if now["open"]:
            found.append(f"{len(now['open'])} requests stayed open")
        for what in ("num_running", "num_waiting"):
            if now["engine"][what]:
                found.append(f"{what} stayed at {now['engine'][what]}")
        if (more := now["restarts"] - before.restarts) > 0:
            found.append(f"{more} workers died")
        if (more := num_files(self.pid) - before.num_files) > MORE_FILES:
            found.append(f"{more} more files stayed open")
        if (more := status(self.pid, "Threads") - before.num_threads) > MORE_THREADS:
            found.append(f"{more} more threads stayed")
        return found

    def _judge_log(self, row: Row, lines: list[str]) -> None:
        if any("Traceback" in line for line in lines):
            row.problems.append("a traceback is in the log")
        others = [line for line in lines if not _OF_A_REQUEST.fullmatch(line)]
        if len(others) > LOG_LINES:
            row.problems.append(f"{len(others)} lines are in the log, such as {others[-1]!r}")


#: The line of the log that each request has.
_OF_A_REQUEST = re.compile(r"\S+ INFO +\S+ (key=\w+ )?[A-Z]+ \S+ \d{3} .* id=\S+")


@contextlib.contextmanager
def arena(folder: Path, kind: str) -> Iterator[Arena]:
    """A new server of the kind, and what it is like alone."""
    words = list(WORDS)
    if kind == KEYS:
        keys = folder / "keys"
        keys.write_text("\n".join((VICTIM, MALLORY, *MANY_KEYS)) + "\n")
        keys.chmod(0o600)
        words += ["--api-key-file", str(keys)]
    with serving(folder, *words) as served:
        made = Arena(served, kind, Seen())
        made.look(1.0)  # what is compiled, or read for the first time
        made.alone = made.look(_START_SECONDS)
        assert not made.alone.wrong, made.alone.wrong
        yield made
