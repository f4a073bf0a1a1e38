"""Attention on a real GPU in all its forms and cuts: time, bandwidth, error, agreement of bits.

    PYTHONPATH=src:tests/support python3 benchmarks/gpu_attention.py --out results.json

Each step is launched from a graph over caches that together exceed the L2 cache, so that a figure
is that of a layer in a decode step. Imports torch directly: it fills and measures the device from
outside the doors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, launch, memory
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import attention, attention_gpu
from hypocenter.kernels.attention.attention_gpu import Form
from hypocenter.verify import bounds

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
BEYOND_L2_BYTES = 256 << 20
SPLIT_FORMS = [Form(16, warps, stages) for warps in (2, 4, 8) for stages in (1, 2, 3)]
WHOLE_FORMS = [
    Form(rows, warps, stages)
    for rows, warps in ((16, 4), (32, 4), (32, 8), (64, 4), (64, 8), (128, 8))
    for stages in (1, 2)
]


class Problem:
    """Some sequences of the same context on the device, in pages that lie in random order."""

    def __init__(
        self, device: str, context: int, num_sequences: int, num_tokens: int, kv_dtype: DType
    ) -> None:
        import torch

        self.torch, self.device, self.context = torch, device, context
        torch.manual_seed(context)
        num_blocks = -(-context // BLOCK_SIZE)
        self.num_rows = num_sequences * num_tokens
        self.num_sequences = num_sequences
        shape = (num_sequences * num_blocks, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        value_shape = (num_sequences * num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        size = 2 if kv_dtype is DType.F16 else 4
        self.cache_bytes = 2 * size * num_sequences * context * KV_HEADS * HEAD_DIM
        self.layers = [
            (self.floats("k", shape, kv_dtype), self.floats("v", value_shape, kv_dtype))
            for _ in range(max(2, min(64, BEYOND_L2_BYTES // self.cache_bytes)))
        ]
        order = np.random.default_rng(1).permutation(num_sequences * num_blocks)
        self.order = order.reshape(num_sequences, num_blocks)
        self.tables = self.ints("tables", self.order)
        rows = np.repeat(np.arange(num_sequences), num_tokens)
        self.rows = self.ints("rows", rows)
        positions = np.tile(np.arange(context - num_tokens, context), num_sequences)
        self.positions = self.ints("positions", positions)
        self.counts = self.ints("counts", np.array([self.num_rows, 0]))
        self.q = self.floats("q", (self.num_rows, HEADS * HEAD_DIM), DType.F32)
        self.out = self.floats("out", (self.num_rows, HEADS * HEAD_DIM), DType.F32)
        self.partial: attention.TileScratch | None = None

    def ints(self, name: str, values: np.ndarray[Any, Any]) -> Tensor:
        made = memory.allocate(name, "benchmark", DType.I32, values.shape, device=self.device)
        copies.to_device(made, values.astype(np.int32))
        return made

    def floats(self, name: str, shape: tuple[int, ...], dtype: DType) -> Tensor:
        made = memory.allocate(name, "benchmark", dtype, shape, device=self.device)
        made.data.normal_()
        return made

    def steps(self, form: Form | None, *, split: bool) -> Callable[[], None]:
        """Attention of every layer's cache, one after the other."""
        plan = PlanBuilder(self.num_rows, self.device)
        if split and self.partial is None:
            blocks = self.tables.shape[1]
            self.partial = attention.TileScratch.allocate(
                *self.layers[0], self.num_rows, HEADS, blocks, device=self.device
            )
        name = "split_form" if split else "whole_form"
        chosen = getattr(attention_gpu, name)
        if form is not None:
            setattr(attention_gpu, name, lambda *_: form)
        try:
            for keys, values in self.layers:
                attention.attention(
                    plan, self.q, keys, values, self.tables, self.rows, self.positions, self.out,
                    self.counts, num_heads=HEADS, scale=HEAD_DIM**-0.5,
                    num_sequences=self.num_sequences, partial=self.partial if split else None,
                )  # fmt: skip
        finally:
            setattr(attention_gpu, name, chosen)
        return lambda: launch.run(plan.launches)

    def result(self) -> Any:
        self.torch.cuda.synchronize()
        return self.out.data.clone().view(self.out.shape)

    def error(self, got: Any) -> float:
        """Largest error against float64 over its bound, last layer: see `verify/bounds.py`."""
        torch = self.torch
        keys, values = (tensor.data.view(tensor.shape) for tensor in self.layers[-1])
        worst, per = 0.0, self.num_rows // self.num_sequences
        for sequence, head in itertools.product({0, self.num_sequences - 1}, {0, HEADS - 1}):
            pages = torch.from_numpy(self.order[sequence].astype(np.int64)).cuda()
            kv = head * KV_HEADS // HEADS
            k = keys[pages, kv].double().permute(0, 2, 1).reshape(-1, HEAD_DIM)[: self.context]
            v = values[pages, kv].double().reshape(-1, HEAD_DIM)[: self.context]
            at = slice(sequence * per, (sequence + 1) * per)
            columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            q = self.q.data.view(got.shape)[at, columns]
            is_f16 = self.layers[-1][0].dtype is DType.F16
            if is_f16:
                q = torch.from_numpy(bounds.as_f16(q.cpu().numpy())).cuda()
            scores = q.double() @ k.T * HEAD_DIM**-0.5
            position = torch.arange(self.context - per, self.context, device=k.device)
            hidden = torch.arange(self.context, device=k.device)[None] > position[:, None]
            weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=1)
            right = weights @ v
            bound = (np.log2(self.context) + 4) * bounds.EPS * (weights @ v.abs())
            if is_f16:
                spread = (weights @ v**2 - right**2).clamp(min=0).sqrt()
                bound = bound + 2.0**-11 * spread
            difference = (got[at, columns].double() - right).abs()
            worst = max(worst, float((difference / bound).max()))
        return worst

    def seconds(self, run: Callable[[], None], num_runs: int = 7) -> float:
        """Device seconds per layer."""
        torch = self.torch
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(num_runs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        return float(statistics.median(times)) / len(self.layers)


def measure(device: str, kv_dtype: DType, until: float) -> Iterator[dict[str, Any]]:
    for context, batch in itertools.product((128, 2048, 8192), (1, 16)):
        problem = Problem(device, context, batch, 1, kv_dtype)
        yield from _forms(problem, f"decode {context} x {batch}", True, until)
    for num_tokens in (512, 2048):
        problem = Problem(device, num_tokens, 1, num_tokens, kv_dtype)
        yield from _forms(problem, f"prefill {num_tokens}", False, until)


def _forms(problem: Problem, case: str, is_decode: bool, until: float) -> Iterator[dict[str, Any]]:
    first = None
    forms: list[tuple[bool, Form | None]] = [(is_decode, None), (False, Form(16, 4, 1))]
    forms += [(is_decode, form) for form in (SPLIT_FORMS if is_decode else WHOLE_FORMS)]
    for split, form in forms:
        row: dict[str, Any] = {"case": case, "split": split, "form": str(form or "chosen")}
        try:
            if time.monotonic() > until:
                row["problem"] = "no time left"
                yield row
                continue
            run = problem.steps(form, split=split)
            seconds = problem.seconds(run)
            got = problem.result()
        except Exception as error:  # the next form must still run
            yield row | {"problem": f"{type(error).__name__}: {error}"[:200]}
            continue
        first = got if first is None else first
        pairs = problem.num_rows * problem.context / (1 if is_decode else 2)
        row |= {
            "us": round(seconds * 1e6, 2),
            "gb_s": round(problem.cache_bytes / seconds / 1e9),
            "tflop_s": round(4 * HEADS * HEAD_DIM * pairs / seconds / 1e12, 2),
            "error_per_bound": round(problem.error(got), 4),
            "different": int(
                (got.view(problem.torch.int32) != first.view(problem.torch.int32)).sum()
            ),
        }
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description="attention on a GPU in all its forms")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache", default="f16", choices=("f16", "f32"))
    parser.add_argument("--seconds", type=float, default=150.0, help="stop measuring after")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    devices.open_device(options.device)
    until, rows = time.monotonic() + options.seconds, []
    for row in measure(options.device, DType[options.cache.upper()], until):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
