"""What a draft model gains, and whether answers with it are those without, token for token.

    python benchmarks/draft_model.py MODEL DRAFT --device cuda --streams 1 8 --quality 0.75 0

Each answer is held to random tokens, of which the draft model knows the share `--quality`, and else
says another: it costs what it costs, and is as good as that. `--own` measures what the two models
say themselves, which trained files make sense of. Runs with drafts and without take turns. `cpu`
and small files will do; `benchmarks/large_gguf.py PATH LAYERS` writes an 8B shape, with one layer
a draft model of the size of a head that drafts.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

from hypocenter import LLM, SamplingParams
from hypocenter.cli.measured_drafts import Script
from hypocenter.engine.drafting import drafter
from hypocenter.engine.drafting.drafter import Drafter

#: What is asked for to compare tokens: settings of requests that run together.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "seed": 3, "repeat_penalty": 1.1},
    {"frequency_penalty": 0.5, "seed": 4, "logprobs": 2},
)


def num_differing(llm: LLM, num_tokens: int) -> tuple[int, int]:
    """Answers that differ with drafts, alone or together, and drafts that were tried for them."""
    random = np.random.default_rng(5)
    prompts = [random.integers(300, llm.vocab_size, 40).tolist() for _ in SETTINGS]
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
        alone = llm.engine.complete(requests[:1])
        found = [*alone, *llm.engine.complete(requests[1:])]
        said[drafts] = [(one.token_ids, one.logprobs) for one in found]
        num_tried += sum(one.timings.num_drafted_tokens for one in found)
    pairs = zip(said[False], said[True], strict=True)
    return sum(one != other for one, other in pairs), num_tried


def seconds(
    llm: LLM, num_streams: int, num_tokens: int, quality: float | None, *, drafts: bool
) -> tuple[float, int, int]:
    """From the first token of all to the last one; drafts that were tried, and right ones."""
    random = np.random.default_rng(0)
    requests = []
    for _ in range(num_streams):
        prompt, answer = random.integers(300, llm.vocab_size, (2, num_tokens)).tolist()
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, drafts=drafts)
        request = llm.request(prompt[:64], params)
        if quality is not None:
            request.rules = Script(answer, llm.engine.runner.vocab_size, quality)
        requests.append(request)
        llm.engine.submit(request)
    while not all(request.output_ids for request in requests):
        llm.engine.step()
    began, before = time.perf_counter(), sum(len(request.output_ids) for request in requests)
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
    llm: LLM, num_streams: int, num_tokens: int, quality: float | None, repetitions: int
) -> dict[str, Any]:
    """Pairs with drafts and without, after one that is not counted."""
    ratios, speeds = [], []
    counts = 0, 0
    for repetition in range(-1, repetitions):
        took = {}
        for drafts in (False, True) if repetition % 2 else (True, False):
            took[drafts], *tried = seconds(llm, num_streams, num_tokens, quality, drafts=drafts)
            counts = (int(tried[0]), int(tried[1])) if drafts else counts
        if repetition >= 0:
            ratios.append(took[False] / took[True])
            speeds.append(1 / took[True])
    return {
        "streams": num_streams,
        "quality": "own" if quality is None else quality,
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
        "tokens_per_second": round(statistics.median(speeds), 1),
        "num_drafted": counts[0],
        "num_accepted": counts[1],
    }


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--quality", type=float, nargs="+", default=[0.75, 0.0])
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--draft-max", type=int, default=7)
    given = parser.parse_args(words)
    with LLM(
        given.model,
        draft_model=given.draft,
        draft_max=given.draft_max,
        device=given.device,
        context_length=max(2 * given.tokens + 64, 256),
        max_batch_requests=max(*given.streams, 8),
    ) as llm:
        llm.engine.capture()
        record = llm.engine.draft_model.record  # type: ignore[union-attr]
        prices = functools.partial(record.prices, is_chained=record.is_chained)
        print(json.dumps({"guessed_cost": round(prices()[1], 3)}), flush=True)
        qualities = [*given.quality, *([None] if given.own else [])]
        for num_streams in given.streams:
            for quality in qualities:
                found = measure(llm, num_streams, given.tokens, quality, given.repetitions)
                print(json.dumps(found | {"cost": round(prices()[1], 3)}), flush=True)
        with (
            mock.patch.object(drafter, "best_number", lambda odds, most, price_of: (most, True)),
            mock.patch.object(Drafter, "_left", return_value=math.inf),
        ):
            differing, tried = num_differing(llm, given.tokens)
        compiled = llm.engine.runner.num_compiled_since
        print(json.dumps({"differing": differing, "tried": tried, "compiled": compiled}))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
