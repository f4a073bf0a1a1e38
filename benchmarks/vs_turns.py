"""Runs two workers by turns on the same tests, and refuses what they did differently than asked.

Before and after each decode a third worker reads memory: on a shared machine its bandwidth changes
within minutes. Works out speeds only; what they mean is vs_report.py's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vs_models import BenchmarkError, FileFacts
from vs_protocol import Facts, Worker
from vs_report import BESIDE

TOKEN_SEED = 0
#: Special ids come first in every synthetic vocabulary.
FIRST_TOKEN = 3
#: The system counts processor time in ticks, so a short look may be off by two.
_TICKS = 2
#: Tokens that a decode begins with and that do not count: processors that were idle take turns to
#: get back to speed, and those of a virtual machine to where they had been.
NUM_WARM = 8
#: How long memory may stay slower than asked for before a pair is given up.
PATIENCE_SECONDS = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What both workers must report to have done."""

    file: FileFacts
    num_threads: int
    context_length: int
    batch: int
    kv_dtype: str = "f16"
    #: Of ours; llama.cpp has no such choice.
    float_products: str = "exact"

    def load_arguments(self, engine: str) -> Facts:
        common = {
            "num_threads": self.num_threads, "context_length": self.context_length,
            "batch": self.batch, "kv_dtype": self.kv_dtype,
        }  # fmt: skip
        return common | ({"float_products": self.float_products} if engine == "ours" else {})

    @property
    def main_dtype(self) -> str:
        """The type that most of our weights are held in."""
        return "BF16" if self.float_products == "bf16" else self.file.main_dtype


def require_load(asked: Asked, engine: str, facts: Mapping[str, Any]) -> None:
    """Raise BenchmarkError unless a worker holds what was asked for, as it was asked for."""
    expected = {"file_type": asked.file.file_type, **asked.load_arguments(engine)}
    if "main_dtype" in facts:  # llama.cpp does not tell the types of its tensors
        expected["main_dtype"] = asked.main_dtype
    _require(engine, expected, facts)


def require_run(asked: Asked, engine: str, num_tokens: int, facts: Mapping[str, Any]) -> None:
    """Raise BenchmarkError unless a run took `num_tokens` tokens with the threads asked for."""
    _require(engine, {"num_tokens": num_tokens, "num_threads": asked.num_threads}, facts)


def _require(engine: str, expected: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if facts.get(name) != value:
            raise BenchmarkError(
                f"{engine} reports {name} {facts.get(name)}, but {value} was asked for; nothing "
                "can be compared"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """The tests of one file: decodes at each depth, then prompts into an empty cache.

    A round has `pairs` decodes of each engine at each depth, for which the cache is filled once. A
    pair counts where memory gives `bytes_per_second` at every reading beside it.
    """

    prompt: int
    generate: int
    depths: tuple[int, ...]
    rounds: int
    pairs: int
    vocab_size: int
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run that counts; of a decode, with the bytes/s of memory just before and after it."""

    tokens_per_second: float
    started_seconds: float  # since the benchmark began
    bandwidth_before: float | None
    bandwidth_after: float | None
    number: int  # of its pair, or round of prompts, at every depth

    @property
    def slowest_reading(self) -> float:
        """Bytes/s; 0 where memory was not read."""
        return min(self.bandwidth_before or 0.0, self.bandwidth_after or 0.0)


class Turns:
    """Both workers (or one) in turns on each test of a plan: A B, B A, A B ...

    `meter` reads memory and has no model; `began` is the time.perf_counter() of the benchmark.
    """

    def __init__(
        self, workers: Mapping[str, Worker], meter: Worker, asked: Asked, plan: Plan, say: Say,
        began: float,
    ) -> None:  # fmt: skip
        self._workers, self._meter, self._asked, self._plan = workers, meter, asked, plan
        self._say, self._began = say, began
        self._all = {**workers, meter.name: meter}
        #: What the meter reported, in order.
        self.readings: list[Facts] = []
        #: Most of a core that each worker used while it was another's turn.
        self.out_of_turn = dict.fromkeys(self._all, 0.0)
        #: Most cores that processes of others used during a run.
        self.others = 0.0
        #: Pairs of decodes beside which memory was slower than asked for.
        self.num_pairs_left_out = 0

    def tests(self) -> dict[str, dict[str, list[Run]]]:
        """Name of each test as llama-bench writes it, and the runs of each engine by round.

        The depths of a round follow each other: what is compared should lie close in time.
        """
        plan = self._plan
        decodes = {
            f"tg{plan.generate}" + (f" @ d{depth}" if depth else ""): partial(self._decodes, depth)
            for depth in plan.depths
        }
        prompts = {f"pp{plan.prompt}": self._prompts}
        return self._rounds(decodes) | self._rounds(prompts)

    def _rounds(
        self, tests: Mapping[str, Callable[[int], Iterator[tuple[str, Run]]]]
    ) -> dict[str, dict[str, list[Run]]]:
        """Every test once a round; the first round warms up, and does not count."""
        found: dict[str, dict[str, list[Run]]] = {
            test: {name: [] for name in self._workers} for test in tests
        }
        for round_ in range(self._plan.rounds + 1):
            for test, measure in tests.items():
                for name, run in measure(round_):
                    if round_:
                        found[test].setdefault(name, []).append(run)
        for test, runs_of in found.items():
            for name, runs in runs_of.items():
                speeds = ", ".join(f"{run.tokens_per_second:.1f}" for run in runs)
                self._say(f"{test}: {name} {speeds} t/s")
        return found

    def _decodes(self, depth: int, round_: int) -> Iterator[tuple[str, Run]]:
        plan = self._plan
        if depth:
            for name in self._in_turn(round_):
                self._once(self._workers[name], "prefill", depth, seed=depth)
        wanted, before = plan.bytes_per_second if round_ else 0.0, self._reading()
        for pair in range(plan.pairs if round_ else 1):
            deadline = time.perf_counter() + PATIENCE_SECONDS
            is_slow, names = True, self._in_turn(round_ + pair)
            while is_slow and time.perf_counter() < deadline:
                while before < wanted and time.perf_counter() < deadline:
                    before = self._reading()
                runs = list(self._pair(depth, round_ * plan.pairs + pair, names, before))
                before = runs[-1][1].bandwidth_after or 0.0
                is_slow = any(run.slowest_reading < wanted for _, run in runs)
                self.num_pairs_left_out += is_slow
            if not is_slow:
                yield from runs

    def _pair(
        self, depth: int, number: int, names: list[str], before: float
    ) -> Iterator[tuple[str, Run]]:
        """A decode of each engine on the tokens of pair `number`, with memory read after each;
        `before` is the reading before."""
        for name in names:
            # Ours can leave a long context and come back, so what that costs is seen at once.
            depths = (depth, 0) if depth and name == "ours" else (depth,)
            for at in depths:
                started = self._elapsed()
                worker = self._workers[name]
                speed = self._once(
                    worker, "decode", self._plan.generate, number, depth=at, num_warm=NUM_WARM
                )
                after = self._reading()
                label = name if at == depth else name + BESIDE
                yield label, Run(speed, started, before, after, number)
                before = after  # the next run follows at once

    def _prompts(self, round_: int) -> Iterator[tuple[str, Run]]:
        for name in self._in_turn(round_):
            started = self._elapsed()
            speed = self._once(self._workers[name], "prefill", self._plan.prompt, round_)
            yield name, Run(speed, started, None, None, round_)

    def _in_turn(self, number: int) -> list[str]:
        """The engines; which of them leads alternates."""
        names = list(self._workers)
        return names if number % 2 else names[::-1]

    def _reading(self) -> float:
        """Bytes per second of memory now."""
        started = self._elapsed()
        facts = self._watched(self._meter, "bandwidth", num_threads=self._asked.num_threads)
        self.readings.append({"started_seconds": started, **facts})
        return float(facts["sustained"])

    def _once(
        self, worker: Worker, command: str, num_tokens: int, seed: int, **arguments: Any
    ) -> float:
        """Tokens per second of one run."""
        tokens = random_tokens(self._plan.vocab_size, num_tokens, seed)
        facts = self._watched(worker, command, tokens=tokens, **arguments)
        require_run(self._asked, worker.name, num_tokens, facts)
        return num_tokens / float(facts["seconds"])

    def _watched(self, worker: Worker, command: str, **arguments: Any) -> Facts:
        """What the worker reports; notes who else was busy meanwhile.

        Threads that spin after a run would slow what comes next, a reading of memory most of all.
        So each engine and the meter are processes of their own, and a turn begins only when the
        system shows every thread of all three asleep; they stay so until they are asked.
        """
        for one in self._all.values():
            one.wait_until_asleep()
        before, started = self._busy_seconds(), time.perf_counter()
        facts = worker.ask(command, **arguments)
        elapsed, after = time.perf_counter() - started, self._busy_seconds()
        busy = {name: after[name] - before[name] for name in after}
        whole = busy.pop("machine", 0.0)
        tolerance = _TICKS / os.sysconf("SC_CLK_TCK")
        for name, seconds in busy.items():
            if self._all[name] is not worker:
                share = max(seconds - tolerance, 0.0) / elapsed
                self.out_of_turn[name] = max(self.out_of_turn[name], share)
        foreign = max(whole - sum(busy.values()) - 2 * tolerance, 0.0) / elapsed
        self.others = max(self.others, foreign)
        return facts

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def _busy_seconds(self) -> dict[str, float]:
        busy = {name: worker.cpu_seconds() for name, worker in self._all.items()}
        return busy | {"machine": _machine_seconds()}


def random_tokens(vocab_size: int, num_tokens: int, seed: int = 0) -> list[int]:
    """Random ordinary ids, the same for both engines."""
    random = np.random.default_rng([TOKEN_SEED, seed])
    return [int(id) for id in random.integers(FIRST_TOKEN, vocab_size, num_tokens)]


def _machine_seconds() -> float:
    """Seconds that all cores together have worked (proc_stat(5): user, nice, system, irqs)."""
    fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    worked = (int(fields[at]) for at in (0, 1, 2, 5, 6))
    return sum(worked) / os.sysconf("SC_CLK_TCK")
