"""Steps of many rows on a real GPU: prompts, and one token of each of several sequences.

An 8B-shaped model with random weights, each step as a captured graph. Imports torch directly, for
its events: it measures the device from outside the doors.
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

import numpy as np
from gpu_model import large_weights, llama_8b
from gpu_speed import _by_kernel, event_seconds

from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices
from hypocenter.device.marks import mark_memory
from hypocenter.model.layers.decoder import Decoder
from hypocenter.model.layers.step_buffers import Cache, KVPages, StepInputs

#: Tokens of a prompt, and sequences of a decode step at DEPTH.
PROMPTS, BATCHES, DEPTH = (512, 2048), (1, 2, 4, 8, 16, 32, 64), 512
_BLOCK_SIZE, _CONTEXT = 16, 1 << 16
#: Operations of the products of a token: two for each weight, one row of logits apart.
_TYPES = (DType.F16, DType.Q8_0, DType.Q4_0, DType.Q4_K, DType.Q6_K)


def run(device: str) -> dict[str, Any]:
    """Tokens per second of each type's steps, TFLOP/s of a prompt's products, slowest kernels."""
    devices.open_device(device)
    rows, table = [], []
    for dtype in _TYPES:
        try:
            row = _type(device, dtype)
        except Exception as error:  # the next type must still be measured
            rows.append({"dtype": dtype.name, "problem": f"{type(error).__name__}: {error}"[:400]})
            continue
        rows.append(row)
        prompts = "  ".join(
            f"{one['num_tokens']}: {one['tokens_per_s']:.0f} ({one['tflops']:.0f} TFLOP/s)"
            for one in row["prompts"]
        )
        batches = "  ".join(
            f"{one['num_sequences']}: {one['tokens_per_s']:.0f}" for one in row["batches"]
        )
        table.append(f"{dtype.name:5} prompts {prompts}  batches {batches}")
    return {"ok": all("problem" not in row for row in rows), "models": rows, "table": table}


def _type(device: str, dtype: DType) -> dict[str, Any]:
    backend: Any = devices.backend_of(device)
    mark_memory(device)
    before = set(backend.addresses)
    facts = llama_8b(_CONTEXT)
    weights, _ = large_weights(facts, dtype, 4096, device)
    most_tokens, most_sequences = max(PROMPTS), max(BATCHES)
    blocks_each = max(most_tokens, DEPTH + _BLOCK_SIZE) // _BLOCK_SIZE
    num_blocks = max(most_sequences * (DEPTH // _BLOCK_SIZE + 1), blocks_each)
    inputs = StepInputs.allocate(most_tokens, most_sequences, blocks_each, device=device)
    pages = KVPages.allocate(facts, num_blocks, _BLOCK_SIZE, DType.F16, device=device)
    decoder = Decoder(facts, weights, inputs, Cache(pages), most_tokens)
    tables = np.zeros((most_sequences, blocks_each), np.int32)
    result: dict[str, Any] = {"dtype": dtype.name, "prompts": [], "batches": []}
    per_token = (
        2
        * facts.num_layers
        * facts.width
        * (facts.width * 2 + 2 * facts.layers[0].kv_width + 3 * facts.layers[0].ffn_width)
    )
    tables[0] = np.arange(blocks_each)
    copies.to_device(inputs.block_tables, tables)
    for num_tokens in PROMPTS:
        at = np.arange(num_tokens, dtype=np.int32)
        seconds, slowest = _step(decoder, inputs, at, at, np.zeros_like(at), 1)
        result["prompts"].append(
            {
                "num_tokens": num_tokens,
                "ms": seconds * 1e3,
                "tokens_per_s": num_tokens / seconds,
                "tflops": num_tokens * per_token / seconds / 1e12,
                "slowest_kernels_us": slowest,
            }
        )
    own = DEPTH // _BLOCK_SIZE + 1
    tables[:, :own] = np.arange(most_sequences * own).reshape(most_sequences, own)
    copies.to_device(inputs.block_tables, tables)
    for num_sequences in BATCHES:
        row = np.arange(num_sequences, dtype=np.int32)
        at = np.full_like(row, DEPTH)
        slots = (tables[row, DEPTH // _BLOCK_SIZE] * _BLOCK_SIZE).astype(np.int32)
        seconds, slowest = _step(decoder, inputs, at, slots, row, num_sequences)
        result["batches"].append(
            {
                "num_sequences": num_sequences,
                "ms": seconds * 1e3,
                "tokens_per_s": num_sequences / seconds,
                "slowest_kernels_us": slowest,
            }
        )
    del decoder, weights, inputs, pages
    gc.collect()
    for address in set(backend.addresses) - before:
        backend.free(address)
    return result


def _step(
    decoder: Decoder,
    inputs: StepInputs,
    positions: np.ndarray[Any, Any],
    slots: np.ndarray[Any, Any],
    sequence_rows: np.ndarray[Any, Any],
    num_logit_rows: int,
) -> tuple[float, dict[str, float]]:
    """Median device seconds of a step, and the microseconds of its slowest kernels."""
    num_tokens = len(positions)
    backend: Any = devices.backend_of(inputs.counts.device)
    plan = decoder.plan(num_tokens, num_logit_rows)

    def put(tensor: Any, values: np.ndarray[Any, Any]) -> None:
        wide = np.zeros(tensor.shape, np.int32)
        wide[: len(values)] = values
        copies.to_device(tensor, wide)

    put(inputs.token_ids, np.arange(num_tokens) * 37 % 1000)
    put(inputs.positions, positions)
    put(inputs.slots, slots)
    put(inputs.sequence_rows, sequence_rows)
    put(inputs.logit_rows, num_tokens - 1 - np.arange(num_logit_rows))
    put(inputs.counts, np.array([num_tokens, num_logit_rows]))
    graph = backend.capture(plan.run)
    seconds = statistics.median(event_seconds(graph, 7))
    if not np.isfinite(copies.to_host(plan.result)).all():
        raise ArithmeticError("logits are not finite")
    slowest = _by_kernel(plan)
    return seconds, dict(list(slowest.items())[:8])
