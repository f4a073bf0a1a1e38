"""A mixture of experts with all of it on a GPU, with experts on the host, and on the CPU alone.

    python benchmarks/host_experts.py --device cuda --layers 12 [MODEL]

Without MODEL a file of the first layers of Qwen3-30B-A3B's shape is written (`large_gguf.py`), with
random weights. Says how fast requests go on behind a prompt, how fast that is read, and how many of
the greedy tokens are those of the GPU alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from kv_speed import rate
from large_gguf import QWEN3_30B, write

from hypocenter import LLM, EngineConfig, SamplingParams

CONTEXT, NUM_TOKENS = 1024, 32


def figures(model: Path, fields: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """What is told of one way to run a model, and its greedy tokens."""
    config = EngineConfig(
        context_length=CONTEXT, max_batch_requests=4, prefix_cache=False, **fields
    )
    with LLM(model, config) as llm:
        rates = [rate(llm, 1, 128, NUM_TOKENS) for _ in range(3)]
        ids = list(range(300, 812))
        start = time.perf_counter()
        request = llm.engine.request(ids, SamplingParams(max_tokens=1, ignore_eos=True))
        llm.engine.complete([request])
        of_prompt = len(ids) / (time.perf_counter() - start)
        request = llm.engine.request(ids[:64], SamplingParams(max_tokens=16, ignore_eos=True))
        llm.engine.complete([request])
        told = {
            "decode": [round(one, 1) for one in rates],
            "prompt": round(of_prompt),
        }
        return told, list(request.output_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=12)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model
        if model is None:
            model = Path(folder) / "mixture.gguf"
            write(model, QWEN3_30B, asked.layers)
        first: list[int] = []
        for name, fields in {
            "device alone": {"device": asked.device},
            "half on the host": {"device": asked.device, "n_cpu_moe": asked.layers // 2},
            "experts on the host": {"device": asked.device, "cpu_moe": True},
            "CPU alone": {"device": "cpu"},
        }.items():
            told, ids = figures(model, fields)
            first = first or ids
            same = sum(a == b for a, b in zip(ids, first, strict=True))
            print(json.dumps({name: told, "same": f"{same} of {len(ids)}"}), flush=True)


if __name__ == "__main__":
    main()
