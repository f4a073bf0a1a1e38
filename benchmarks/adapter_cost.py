"""What a LoRA adapter costs: the same requests with and without one, several at a time.

Two engines have the same model, one of them with a random adapter beside each of its matrices. By
turns each answers so many requests together, which differ in their prompts: the engine without
adapters; the other one, of which no request asks for the adapter; and the other one, of which all
do. Prompts and answers are timed as one, and most of it is answers. Writes
benchmarks/results/adapter_cost.json.

    python benchmarks/adapter_cost.py [model.gguf] [--device cuda]

The figures are tokens of answers a second, and what is left of the speed without an adapter: the
median of the turns with the lowest and the highest. Each is a pair of one turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hypocenter import LLM
from hypocenter.base.dtypes import Array
from hypocenter.base.package import bundled_model
from hypocenter.base.tensor import DType
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.gguf.writing import PlannedTensor, alignment_of, head_of, new_file

ROOT = Path(__file__).parent.parent
_PROMPT_TOKENS = 32
#: Matrices that adapters of most trainers stand beside.
_ADAPTED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NONE, _IDLE, _ASKED = "without adapters", "not asked for", "asked for"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="else the bundled model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--label", default="the bundled model")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/adapter_cost.json")
    options = parser.parse_args()
    model = options.model or bundled_model()
    most = max(options.streams)
    settings: dict[str, Any] = {
        "device": options.device,
        "context_length": 512,
        "max_batch_requests": most,
        "kv_tokens": 512 * most,
        "prefix_cache": False,
    }
    with tempfile.TemporaryDirectory() as made:
        adapter = Path(made) / "adapter.gguf"
        with open_gguf(model) as file:
            _write_adapter(adapter, file, options.rank)
        with LLM(model, **settings) as plain, LLM(model, lora=(str(adapter),), **settings) as other:
            rows = [_row(plain, other, num, options) for num in options.streams]
    report = {
        "model": options.label,
        "device": options.device,
        "rank": options.rank,
        "turns": options.turns,
        "streams": rows,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _row(plain: LLM, other: LLM, num: int, options: argparse.Namespace) -> dict[str, Any]:
    ways: dict[str, tuple[LLM, dict[str, Any]]] = {
        _NONE: (plain, {}),
        _IDLE: (other, {"lora": ()}),
        _ASKED: (other, {"lora": (("adapter", 1.0),)}),
    }
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.turns + 1):
        for name, (llm, asked) in ways.items():
            speed = _tokens_a_second(llm, num, options.tokens, asked)
            if turn:  # the first one compiles and captures
                speeds[name].append(speed)
    row: dict[str, Any] = {"num_streams": num}
    for name, found in speeds.items():
        row[name] = {"tokens_per_second": round(statistics.median(found), 1)}
        if name != _NONE:
            shares = sorted(one / base for one, base in zip(found, speeds[_NONE], strict=True))
            told = (statistics.median(shares), shares[0], shares[-1])
            row[name]["share"] = [round(share, 3) for share in told]
    print(json.dumps(row), flush=True)  # a later one may take too long
    return row


def _tokens_a_second(llm: LLM, num: int, num_tokens: int, asked: dict[str, Any]) -> float:
    random = np.random.default_rng(num)
    prompts = random.integers(100, llm.vocab_size, (num, _PROMPT_TOKENS)).tolist()
    began = time.perf_counter()
    answers = llm.generate(prompts, max_tokens=num_tokens, temperature=0, ignore_eos=True, **asked)
    seconds = time.perf_counter() - began
    assert all(len(answer.token_ids) == num_tokens for answer in answers)
    return num * num_tokens / seconds


def _write_adapter(path: Path, base: GGUFFile, rank: int) -> None:
    """One of small random numbers beside each matrix of attention and feed-forwards."""
    random, tensors = np.random.default_rng(1), dict[PlannedTensor, Array]()
    for name, info in base.tensors.items():
        if name.endswith(tuple(f".{part}.weight" for part in _ADAPTED)):
            num_rows, num_columns = info.shape
            for end, shape in (("lora_a", (rank, num_columns)), ("lora_b", (num_rows, rank))):
                values = random.standard_normal(shape, np.float32) * (0.01 / rank)
                planned = PlannedTensor(f"{name}.{end}", DType.F16, shape)
                tensors[planned] = values.astype(np.float16).reshape(-1).view(np.uint8)
    kept = "general.architecture"
    new = {"general.type": "adapter", "adapter.type": "lora"}
    dropped = [key for key in base.metadata if key not in (kept, *new)]
    head = head_of(base, list(tensors), new, dropped)
    with new_file(path, head, alignment_of(base)) as writer:
        for data in tensors.values():
            writer.write(data)
            writer.end_tensor()


if __name__ == "__main__":
    sys.exit(main())
