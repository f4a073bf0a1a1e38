"""Stage five: steps that are launched while those before them run, with inputs that the host puts
down meanwhile, and as graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.device import copies, devices
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
from hypocenter.verify.steps import PromptSteps, TokenSpan, prompt

NAME = "ahead"
ASKS = "do steps that are not waited for, and graphs, give what one step at a time does?"
_TOKENS, _SEQUENCES, _MOST_ROUNDS = 48, 2, 200
#: Where a processor stands for a GPU.
_TOKENS_SIMULATED = 6


class AheadStage:
    """Decodes known tokens without waiting, and holds each step's logits against those of before.

    What is read too early, or overwritten too soon, by mapped memory, streams or graphs, shows as
    another step's numbers.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, is_over: Callable[[], bool]) -> Stage:
        """Go on until the time `is_over`."""
        runner = self._runner
        why = _why_not(runner) or ("the time was over" if is_over() else None)
        if why is not None:
            return _not_run(why)
        started = time.perf_counter()
        is_short = is_simulated(runner.config.device)
        length = min(_TOKENS_SIMULATED if is_short else _TOKENS, runner.context_length - 1)
        steps = PromptSteps(runner, 1 if is_short else _SEQUENCES, length)
        ids = [prompt(runner.vocab_size, length, 20 + row) for row in range(steps.num_sequences)]
        every: list[list[TokenSpan]] = [
            [(item, at, at + 1) for item in ids] for at in range(length)
        ]
        right: list[Array] = []
        while len(right) < length and not is_over():
            right.append(steps.run(every[len(right)]))
        if len(right) < 2:  # one step is no step ahead of another
            return _not_run("the time was over")
        uncovered = []
        if len(right) < length:
            last = f"steps {len(right) + 1} to {length} of a round"
            uncovered.append(Uncovered(last, "the time was over"))
            every, length = every[: len(right)], len(right)
        findings: list[Mistake] = []
        num_rounds = num_checks = 0
        while num_rounds < _MOST_ROUNDS and not (num_rounds and is_over()):
            waited = [copies.to_host_later(steps.launch(spans)) for spans in every]
            found = [item()[:, : steps.width] for item in waited]
            num_checks += len(found)
            num_rounds += 1
            findings += [f for f in (_wrong_step(right, found, at) for at in range(length)) if f]
            if findings:
                break
        num_seen = int(_wrong_step(right, [*right[1:], right[0]], 0) is not None)
        canary = PlantedError("the logits of the next step in place of a step's own", 1, num_seen)
        graphs = runner.route().num_graphs
        if not devices.backend_captures(runner.config.device):
            uncovered.append(Uncovered("graphs", f"{runner.config.device} captures none"))
        return Stage(
            name=NAME,
            asks=ASKS,
            verdict=verdict_of(findings, canary, num_rounds),
            things="steps",
            num_covered=num_checks,
            num_all=num_checks,
            num_checks=num_checks,
            canary=canary,
            findings=tuple(findings[:8]),
            uncovered=tuple(uncovered),
            details={"rounds": num_rounds, "graphs": graphs},
            seconds=time.perf_counter() - started,
        )


def _not_run(why: str) -> Stage:
    left = (Uncovered("steps that are not waited for", why),)
    return Stage(NAME, ASKS, StageVerdict.NOT_RUN, uncovered=left)


def _why_not(runner: Runner) -> str | None:
    if runner.config.device == "cpu":
        return "on the CPU each launch has ended before the host goes on"
    if runner.num_state_slots or runner.arch.family.sees_all:
        return "this model's steps need an engine"
    return None


def _wrong_step(right: list[Array], found: list[Array], at: int) -> Mistake | None:
    if np.array_equal(right[at].view(np.uint32), found[at].view(np.uint32)):
        return None
    other = next(
        (
            step
            for step, logits in enumerate(right)
            if step != at and np.array_equal(logits, found[at])
        ),
        None,
    )
    whose = "of no step" if other is None else f"those of step {other}"
    details = {"step": at, "equals_step": other}
    return Mistake(f"the logits of step {at} are {whose}", "steps without a wait", details)
