"""How fast requests go on over caches of each type, by turns in one process: tokens a second.

    python benchmarks/kv_speed.py MODEL --device cuda --context 4096 --streams 1 16

All engines are open together, and each turn runs them one after the other, so what else a machine
does is shared. Ratios are medians over turns, to the first type that is named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from hypocenter import LLM, EngineConfig, SamplingParams
from hypocenter.settings.config import KV_DTYPES


def rate(llm: LLM, num_streams: int, num_known: int, num_tokens: int) -> float:
    """Tokens a second of so many requests that go on behind `num_known` tokens, prompts apart."""
    ids = list(range(300, 300 + num_known))
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [llm.engine.request(ids[n:] + ids[:n], params) for n in range(num_streams)]
    for request in requests:
        llm.engine.submit(request)
    while any(not request.output_ids for request in requests):
        llm.engine.step()
    before, start = sum(len(request.output_ids) for request in requests), time.perf_counter()
    while not all(request.done for request in requests):
        llm.engine.step()
    seconds = time.perf_counter() - start
    return (sum(len(request.output_ids) for request in requests) - before) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--types", nargs="+", default=["q4_0", "q4_0_hadamard", "f16"])
    asked = parser.parse_args()
    if wrong := set(asked.types) - set(KV_DTYPES):
        parser.error(f"no types of a cache: {', '.join(sorted(wrong))}")
    with ExitStack() as stack:
        engines = {}
        for name in asked.types:
            config = EngineConfig(
                device=asked.device,
                kv_dtype=name,
                context_length=asked.context,
                kv_tokens=max(asked.streams) * asked.context,
                max_batch_requests=max(asked.streams),
                prefix_cache=False,
            )
            engines[name] = stack.enter_context(LLM(asked.model, config))
        for num_streams in asked.streams:
            rates: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(asked.turns + 1):
                for name, llm in engines.items():
                    known = asked.context - asked.tokens - 1
                    found = rate(llm, num_streams, known, asked.tokens)
                    if turn:  # the first one compiles and captures
                        rates[name].append(found)
            first = rates[asked.types[0]]
            told = {
                name: {
                    "median": round(statistics.median(each), 1),
                    "ratio": round(
                        statistics.median(a / b for a, b in zip(each, first, strict=True)), 3
                    ),
                    "rates": [round(one, 1) for one in each],
                }
                for name, each in rates.items()
            }
            print(json.dumps({"streams": num_streams, "context": asked.context, **told}))


if __name__ == "__main__":
    main()
