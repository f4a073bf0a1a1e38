"""Stage two: logits of the device against those of the CPU engine, and of each way of running a
prompt against the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from hypocenter.base.dtypes import Array, Int32s
from hypocenter.device import copies
from hypocenter.engine.runner import Runner
from hypocenter.settings.config import is_simulated
from hypocenter.verify.outcome import (
    Mistake,
    PlantedError,
    Stage,
    StageVerdict,
    Uncovered,
    verdict_of,
)
from hypocenter.verify.rounding import distance, distance_allowed, reach_of_rounding, undecided_of
from hypocenter.verify.steps import PromptSteps, prompt

NAME = "logits"
ASKS = "are logits those of the CPU engine, and the same bits whole, in chunks and together?"
_SHORT, _LONG, _ONE_BY_ONE = 5, 200, 24
#: Where a processor stands for a GPU, prompts are shorter.
_SHORT_SIMULATED, _LONG_SIMULATED, _ONE_BY_ONE_SIMULATED = 2, 12, 3
_CHUNKS = (1, 7, 64)
_TOGETHER = 4


class _TimeOver(Exception):
    """There is no time for the rest of a way."""


class LogitsStage:
    """Runs fixed prompts; `on_cpu` is a runner of the same model on the CPU, None where there is
    none, for the reason `why_no_cpu`."""

    def __init__(
        self,
        runner: Runner,
        on_cpu: Runner | None,
        why_no_cpu: str = "the device is the CPU itself",
    ) -> None:
        self._runner, self._on_cpu, self._why_no_cpu = runner, on_cpu, why_no_cpu
        self._allowed = distance_allowed(runner)
        self._findings: list[Mistake] = []
        self._worst = 0.0
        self._left: list[Uncovered] = []
        self._is_over: Callable[[], bool] = lambda: False
        is_short = is_simulated(runner.config.device)
        self._one_by_one = _ONE_BY_ONE_SIMULATED if is_short else _ONE_BY_ONE
        most = _LONG_SIMULATED if is_short else _LONG
        self._long = min(most, runner.context_length - 1, runner.max_batch_tokens)
        self._short = min(_SHORT_SIMULATED if is_short else _SHORT, self._long)

    def run(self, is_over: Callable[[], bool]) -> Stage:
        """Run each way until the time `is_over`."""
        started = time.perf_counter()
        if (why := self._why_not()) is not None:
            return Stage(NAME, ASKS, StageVerdict.NOT_RUN, uncovered=(Uncovered("all ways", why),))
        ways = list(self._ways())
        left = self._left = []
        num_done = num_checks = 0
        whole: dict[int, Array] = {}
        self._is_over = is_over
        for name, length, work in ways:
            try:
                self._go_on()
                found = work()
            except _TimeOver:
                left.append(Uncovered(name, "the time was over"))
                continue
            num_done += 1
            num_checks += len(found)
            self._hold(name, length, found, whole)
        if self._on_cpu is None:
            left.append(Uncovered("comparison with the CPU engine", self._why_no_cpu))
        canary = self._plant() if num_done else PlantedError("nothing", 0, 0)
        return Stage(
            name=NAME,
            asks=ASKS,
            verdict=verdict_of(self._findings, canary, num_done),
            things="ways of running a prompt",
            num_covered=num_done,
            num_all=len(ways),
            num_checks=num_checks,
            canary=canary,
            findings=tuple(self._findings),
            uncovered=tuple(left),
            details={"largest_distance": self._worst, "distance_allowed": self._allowed},
            seconds=time.perf_counter() - started,
        )

    def _go_on(self) -> None:
        if self._is_over():
            raise _TimeOver

    def _why_not(self) -> str | None:
        if self._runner.num_state_slots:
            return "layers of this model carry states, which steps without an engine do not give"
        if self._runner.arch.family.sees_all:
            return "this model makes vectors of texts, and no logits"
        return None

    def _ids(self, length: int, seed: int = 0) -> Int32s:
        return prompt(self._runner.vocab_size, length, seed)

    def _steps(self, runner: Runner, length: int) -> PromptSteps:
        return PromptSteps(runner, _TOGETHER, length)

    def _ways(self) -> Iterator[tuple[str, int, Callable[[], Array]]]:
        for length in dict.fromkeys((self._short, self._long)):
            yield f"{length} tokens at once", length, partial(self._run_chunks, length, length)
        for chunk in _CHUNKS:
            length = self._long if chunk > 1 else min(self._one_by_one, self._long)
            if chunk < length:
                name = f"{length} tokens in chunks of {chunk}"
                yield name, length, partial(self._run_chunks, length, chunk)
        if self._steps(self._runner, self._long).num_sequences > 1:
            yield "prompts together", self._long, self._run_together

    def _run_chunks(self, length: int, chunk: int) -> Array:
        steps, ids = self._steps(self._runner, length), self._ids(length)
        starts = range(0, length, chunk)
        found = []
        for at in starts:
            found.append(steps.run([(ids, at, min(at + chunk, length))]))
            if at + chunk < length:
                self._go_on()
        return np.concatenate(found)

    def _run_together(self) -> Array:
        """The long prompt in the last row, beside others of other lengths, chunk by chunk."""
        length = self._long
        steps = self._steps(self._runner, length)
        num = steps.num_sequences
        chunk = max(self._runner.max_batch_tokens // num // 2, 1)
        sequences = [self._ids(length, seed) for seed in range(1, num)]
        sequences.append(self._ids(length))
        found = []
        for at in range(0, length, chunk):
            stop = min(at + chunk, length)
            logits = steps.run([(ids, at, stop) for ids in sequences])
            found.append(logits[-(stop - at) :])
            if stop < length:
                self._go_on()
        return np.concatenate(found)

    def _hold(self, name: str, length: int, found: Array, whole: dict[int, Array]) -> None:
        """Compare with the CPU's logits, or with what a way before has given."""
        known = next((rows for size, rows in whole.items() if size >= length), None)
        if known is None or length not in whole:
            self._hold_against_cpu(name, length, found)
        if known is not None:
            same = known[:length].view(np.uint32) == found.view(np.uint32)
            if length in whole or self._is_prefix(length):
                self._hold_bits(name, same, found, known)
        whole.setdefault(length, found)

    def _is_prefix(self, length: int) -> bool:
        return bool((self._ids(self._long)[:length] == self._ids(length)).all())

    def _hold_bits(self, name: str, same: Array, found: Array, known: Array) -> None:
        if same.all():
            return
        row, column = (int(i) for i in np.argwhere(~same)[0])
        what = f"logit {column} of token {row} is not what the prompt gave at once"
        details = {
            "token": row,
            "logit": column,
            "got": float(found[row, column]),
            "at_once": float(known[row, column]),
            "num_differing": int((~same).sum()),
        }
        self._findings.append(Mistake(what, name, details))

    def _hold_against_cpu(self, name: str, length: int, found: Array) -> None:
        if self._on_cpu is None:
            return
        steps, spans = self._steps(self._on_cpu, length), [(self._ids(length), 0, length)]
        right = steps.run(spans)
        apart = [distance(item, other) for item, other in zip(found, right, strict=True)]
        self._worst = max(self._worst, *apart)
        wrong = [at for at, item in enumerate(apart) if not item <= self._allowed]
        if wrong:
            reach = reach_of_rounding(self._on_cpu, lambda: steps.run(spans))
            wrong = [at for at in wrong if math.isinf(apart[at]) or reach[at] <= self._allowed]
            if undecided := undecided_of(range(length), reach, self._allowed):
                self._left.append(undecided)
        if wrong:
            what = f"logits of token {wrong[0]} are {apart[wrong[0]]:.3g} from the CPU's"
            details = {
                "token": wrong[0],
                "distance": apart[wrong[0]],
                "allowed": self._allowed,
                "num_tokens": len(wrong),
            }
            self._findings.append(Mistake(what, name, details))

    def _plant(self) -> PlantedError:
        """Change what the device holds of one row by twice what is allowed, or one bit of it where
        bits are compared, and look again."""
        length = self._short  # such a step has run before
        ids = self._ids(length)
        steps = self._steps(self._runner, length)
        tensor = steps.launch([(ids, 0, length)])
        values = copies.to_host(tensor)
        right = values[:, : steps.width].copy()
        if self._on_cpu is None:
            values.view(np.uint32)[-1, 0] ^= 1
            copies.to_device(tensor, values)
            again = copies.to_host(tensor)[:, : steps.width]
            seen = not np.array_equal(again.view(np.uint32), right.view(np.uint32))
            return PlantedError("the last bit of one logit", 1, int(seen))
        noise = np.random.default_rng(3).standard_normal(right[-1].shape)
        size = np.sqrt(np.mean(np.square(right[-1] - right[-1].mean())))
        values[-1, : steps.width] += (2 * self._allowed * size * noise).astype(np.float32)
        copies.to_device(tensor, values)
        again = copies.to_host(tensor)[:, : steps.width]
        of_cpu = self._steps(self._on_cpu, length).run([(ids, 0, length)])
        seen = distance(again[-1], of_cpu[-1]) > self._allowed
        return PlantedError("a row of logits off by twice what is allowed", 1, int(seen))
