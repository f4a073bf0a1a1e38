"""What a draft model gains with so many drafts a round, and how long the parts of a round take.

    python benchmarks/large_gguf.py 8b.gguf 8b 1
    python benchmarks/large_gguf.py 1b.gguf 1b 0.75
    python benchmarks/draft_rounds.py 8b.gguf 1b.gguf --device cuda --drafts 2 4 6

Without a second file a head of the first one drafts:

    python benchmarks/large_gguf.py head.gguf 8b 1 0.75
    python benchmarks/draft_rounds.py head.gguf --device cuda --drafts 2 4 6

The two files say the same token in three places of four (`large_gguf.py`), so nothing is held to a
text, and drafts are as good as that by themselves. `--drafts` are forced; `0` is a run without, and
`own` leaves the number to the engine. Runs take turns. Parts of a round are told by events on the
GPU's own clock: the draft model's first step, its other steps, the model's step, and what is left
of the round for the host. On a CPU there are none. At the end tokens are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from hypocenter import LLM, SamplingParams
from hypocenter.engine.drafting import drafter
from hypocenter.engine.drafting.drafter import Drafter
from hypocenter.engine.drafting.model_drafter import DraftRecord

#: What is asked for to compare tokens: settings of requests that run together.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "seed": 3, "repeat_penalty": 1.1},
    {"logprobs": 2, "min_tokens": 5},
)


class Clock:
    """Marks on the GPU's clock in each round, and the milliseconds between them."""

    def __init__(self) -> None:
        self.rounds: list[list[Any]] = []

    def mark(self, *, begins: bool = False) -> None:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        if begins:
            self.rounds.append([])
        if self.rounds:
            self.rounds[-1].append(event)

    def parts(self) -> dict[str, float]:
        """The median of each part, in milliseconds."""
        whole = [marks for marks in self.rounds if len(marks) == 4]
        names = ("first_draft", "other_drafts", "model")
        found = {
            name: statistics.median(m[at].elapsed_time(m[at + 1]) for m in whole)
            for at, name in enumerate(names)
            if whole
        }
        apart = [a[0].elapsed_time(b[0]) for a, b in itertools.pairwise(whole)]
        if apart:
            found["round"] = statistics.median(apart)
            found["host"] = found["round"] - sum(found[name] for name in names)
        return {name: round(value, 3) for name, value in found.items()}


@contextmanager
def forcing(number: int | None) -> Iterator[None]:
    """Within, so many tokens are tried wherever there is room; None: as the engine sees fit."""
    with ExitStack() as stack:
        if number is not None:
            best = mock.Mock(side_effect=lambda odds, most, price_of: (min(most, number), True))
            stack.enter_context(mock.patch.object(drafter, "best_number", best))
            stack.enter_context(mock.patch.object(Drafter, "_left", return_value=math.inf))
            never = mock.PropertyMock(return_value=False)
            stack.enter_context(mock.patch.object(DraftRecord, "awaits_steps", never))
        yield


@contextmanager
def marking(llm: LLM, clock: Clock | None) -> Iterator[None]:
    """Within, each round leaves its marks."""
    model, steps = llm.engine.draft_model, llm.engine._steps
    if clock is None or model is None or not model.runner.runs_ahead:
        yield
        return
    chain = model.chain()

    def behind(function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*given: Any, **named: Any) -> Any:
            found = function(*given, **named)
            clock.mark()
            return found

        return marked

    def begins(function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*given: Any, **named: Any) -> Any:
            clock.mark(begins=True)
            return function(*given, **named)

        return marked

    with ExitStack() as stack:
        for owner, name, wrapped in (
            (model, "_begin_chain", begins(model._begin_chain)),
            (chain, "_put", behind(chain._put)),  # behind the first step
            (chain, "write", behind(chain.write)),
            (steps, "launch", behind(steps.launch)),
        ):
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield


def seconds(
    llm: LLM, num_streams: int, num_tokens: int, *, drafts: bool, clock: Clock | None = None
) -> tuple[float, int, int]:
    """For each token, from the first one of all to the last; drafts that were tried, and right
    ones."""
    random = np.random.default_rng(0)
    requests = []
    for _ in range(num_streams):
        prompt = random.integers(300, llm.vocab_size - num_tokens, 64).tolist()
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, drafts=drafts)
        requests.append(llm.request(prompt, params))
        llm.engine.submit(requests[-1])
    while not all(request.output_ids for request in requests):
        llm.engine.step()
    with marking(llm, clock):
        began, before = time.perf_counter(), sum(len(r.output_ids) for r in requests)
        while not all(request.done for request in requests):
            llm.engine.step()
        took = time.perf_counter() - began
    num_made = sum(len(request.output_ids) for request in requests) - before
    for request in requests:
        if request.error:
            raise request.error
    timings = [request.timings() for request in requests]
    tried = sum(one.num_drafted_tokens for one in timings)
    return took / num_made, tried, sum(one.num_accepted_tokens for one in timings)


def measure(
    llm: LLM, num_streams: int, num_tokens: int, numbers: Sequence[int | None], repetitions: int
) -> Iterator[dict[str, Any]]:
    """A row for each number of drafts, after one run of each that is not counted."""
    took: dict[int | None, list[float]] = {number: [] for number in numbers}
    counts: dict[int | None, tuple[int, int]] = {}
    clocks = {number: Clock() for number in numbers}
    for repetition in range(-1, repetitions):
        for number in numbers if repetition % 2 else reversed(numbers):
            clock = clocks[number] if repetition >= 0 and number else None
            with forcing(number):
                one, *tried = seconds(llm, num_streams, num_tokens, drafts=number != 0, clock=clock)
            counts[number] = int(tried[0]), int(tried[1])
            if repetition >= 0:
                took[number].append(one)
    for number in numbers:
        ratios = sorted(a / b for a, b in zip(took[0], took[number], strict=True))
        yield {
            "streams": num_streams,
            "drafts": "own" if number is None else number,
            "tokens_per_second": round(1 / statistics.median(took[number]), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "num_drafted": counts[number][0],
            "num_accepted": counts[number][1],
            "milliseconds": clocks[number].parts(),
        }


def num_differing(llm: LLM, num_tokens: int) -> tuple[int, int]:
    """Answers that differ with drafts, alone or together, and drafts that were tried for them."""
    random = np.random.default_rng(5)
    prompts = [random.integers(300, llm.vocab_size - 999, 40).tolist() for _ in SETTINGS]
    said: dict[bool, list[Any]] = {}
    num_tried = 0
    for drafts in (False, True):
        requests = [
            llm.request(
                prompt,
                SamplingParams(max_tokens=num_tokens, ignore_eos=True, drafts=drafts, **fields),
            )
            for prompt, fields in zip(prompts, SETTINGS, strict=True)
        ]
        alone = llm.engine.complete(requests[:2]) if drafts else []
        found = [*alone, *llm.engine.complete(requests[len(alone) :])]
        said[drafts] = [(one.token_ids, one.logprobs) for one in found]
        num_tried += sum(one.timings.num_drafted_tokens for one in found)
    pairs = zip(said[False], said[True], strict=True)
    return sum(one != other for one, other in pairs), num_tried


def _number_of(word: str) -> int | None:
    return None if word == "own" else int(word)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("draft", nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--drafts", type=_number_of, nargs="+", default=[2, 4, 6, None])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args(words)
    numbers = [0, *given.drafts]
    began = time.perf_counter()
    with LLM(
        given.model,
        draft_model=given.draft,
        spec="off" if given.draft else "mtp",
        draft_max=max([number or 1 for number in numbers] + [7]),
        device=given.device,
        context_length=max(2 * given.tokens + 64, 256),
        max_batch_requests=max(*given.streams, 8),
    ) as llm:
        llm.engine.capture()
        print(json.dumps({"ready_seconds": round(time.perf_counter() - began, 1)}), flush=True)
        for num_streams in given.streams:
            for row in measure(llm, num_streams, given.tokens, numbers, given.repetitions):
                print(json.dumps(row), flush=True)
        model = llm.engine.draft_model
        assert model is not None
        apart, cost = model.record.prices(is_chained=model.record.is_chained)
        print(json.dumps({"apart": round(apart, 3), "cost": round(cost, 3)}))
        with forcing(max(number or 1 for number in numbers)):
            differing, tried = num_differing(llm, given.tokens)
        compiled = llm.engine.runner.num_compiled_since
        print(json.dumps({"differing": differing, "tried": tried, "compiled": compiled}))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
