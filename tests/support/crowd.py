"""64 requests together, each of its own kind, against each alone; and cut in two by a death.

python tests/support/crowd.py cuda                 # on a GPU, with the bundled model
python tests/support/crowd.py cuda 2 model.gguf    # in two parts on two GPUs, with another one
python tests/support/crowd.py cuda 1 "" q4_0       # with another type of the KV cache
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypocenter import LLM, SamplingParams
from hypocenter.engine.admission import RequestTerms
from hypocenter.engine.request import Request

NUM_REQUESTS, NUM_GROUPS, PREFIX, CONTEXT = 64, 4, 40, 160
SCHEMA = {"type": "array", "items": {"type": "integer"}, "maxItems": 6}
#: What each fifth request asks for; all of a kind are not of one group.
KINDS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 20, "ignore_eos": True, "logprobs": 2},
    {"max_tokens": 24, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95, "logprobs": 0},
    {"max_tokens": 24, "temperature": 0.7, "json_schema": SCHEMA},
    {"max_tokens": 16, "ignore_eos": True, "temperature": 1.1, "repeat_penalty": 1.2},
    {"max_tokens": 20, "temperature": 1.0, "grammar": 'root ::= "(" [a-z]+ ")"'},
)  # fmt: skip


class Place(NamedTuple):
    """Where the model runs, over a cache of which type: a device, in so many parts; None: the
    bundled one."""

    device: str
    num_ranks: int = 1
    model: str | None = None
    kv_dtype: str = "f16"


class Ask(NamedTuple):
    prompt: list[int]
    params: SamplingParams


class Told(NamedTuple):
    """Tokens, and of each the bits of the logprob that was asked for."""

    tokens: tuple[int, ...]
    logprobs: tuple[str, ...]


def crowd(vocab_size: int = 4096, seed: int = 0) -> list[Ask]:
    """Requests in groups with a common beginning, of lengths and kinds that differ."""
    chance = random.Random(seed)

    def some(number: int) -> list[int]:
        return [chance.randrange(300, min(vocab_size, 4000)) for _ in range(number)]

    prefixes = [some(PREFIX) for _ in range(NUM_GROUPS)]
    return [
        Ask(
            prefixes[number % NUM_GROUPS] + some(chance.randrange(1, 30)),
            SamplingParams(seed=number, **KINDS[number % len(KINDS)]),
        )
        for number in range(NUM_REQUESTS)
    ]


def open_llm(place: Place, *, num_requests: int, block_memory: str = "") -> LLM:
    return LLM(
        place.model,
        device=place.device,
        kv_dtype=place.kv_dtype,
        tensor_parallel=place.num_ranks,
        context_length=CONTEXT,
        max_batch_requests=num_requests,
        kv_tokens=NUM_REQUESTS * CONTEXT,
        prefix_cache=num_requests > 1,
        block_memory=block_memory,
    )


def told(request: Request) -> Told:
    deltas = list(request.deltas)
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    each = [one for delta in deltas for one in delta.logprobs or ()]
    return Told(tokens, tuple(one.logprob.hex() for one in each))


def each_alone(llm: LLM, asks: Sequence[Ask]) -> list[Told]:
    found = []
    for ask in asks:
        request = llm.request(ask.prompt, ask.params)
        llm.engine.complete([request])
        found.append(told(request))
    return found


def together(llm: LLM, asks: Sequence[Ask], before: Sequence[Told] = ()) -> list[Request]:
    """All submitted, each going on behind what was told of it before."""
    outputs = [one.tokens for one in before] or [()] * len(asks)
    requests = []
    for ask, output in zip(asks, outputs, strict=True):
        terms = RequestTerms(output_ids=output)
        requests.append(llm.engine.request(ask.prompt, ask.params, terms))
    for request in requests:
        llm.engine.submit(request)
    return requests


def run(llm: LLM, requests: Sequence[Request], num_steps: int | None = None) -> int:
    """To their ends, or so many steps; the most that were in one."""
    most = 0
    while not all(request.done for request in requests) and num_steps != 0:
        llm.engine.step()
        most = max(most, len(llm.engine.scheduler.running))
        num_steps = None if num_steps is None else num_steps - 1
    return most


def across_a_death(
    place: Place, num_steps: int, block_memory: str = ""
) -> tuple[list[Told], list[Request]]:
    """What two processes' worth of engines give, the second going on after so many steps of the
    first; and the requests that went on."""
    asks = crowd()
    with open_llm(place, num_requests=NUM_REQUESTS, block_memory=block_memory) as llm:
        requests = together(llm, asks)
        run(llm, requests, num_steps)
        first = [told(request) for request in requests]
        is_open = [not request.done for request in requests]
    left = [number for number, is_so in enumerate(is_open) if is_so]
    both = list(first)
    with open_llm(place, num_requests=NUM_REQUESTS, block_memory=block_memory) as llm:
        resumed = together(llm, [asks[n] for n in left], [first[n] for n in left])
        run(llm, resumed)
        for number, request in zip(left, resumed, strict=True):
            a, b = first[number], told(request)
            both[number] = Told(a.tokens + b.tokens, a.logprobs + b.logprobs)
        return both, resumed


def differing(expected: Sequence[Told], found: Sequence[Told]) -> list[int]:
    return [n for n, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]


def main(place: Place) -> int:
    asks = crowd()
    with open_llm(place, num_requests=1) as llm:
        expected = each_alone(llm, asks)
    with open_llm(place, num_requests=NUM_REQUESTS) as llm:
        requests = together(llm, asks)
        most = run(llm, requests)
        found = [told(request) for request in requests]
        cached = sum(request.num_cached > 0 for request in requests)
    print(f"{place}: {len(asks)} requests, {most} in one step, {cached} with a prefix of others")
    print(f"differ from alone: {differing(expected, found)}")
    both, resumed = across_a_death(place, 9)
    print(f"{len(resumed)} went on; differ across a death: {differing(expected, both)}")
    return int(bool(differing(expected, found) or differing(expected, both)))


if __name__ == "__main__":
    os.environ.setdefault("HYPO_RECORD", "0")
    usual = ["cpu", "1", "", "f16"]
    device, num_ranks, model, kv_dtype = [*sys.argv[1:], *usual[len(sys.argv) - 1 :]]
    sys.exit(main(Place(device, int(num_ranks), model or None, kv_dtype)))
