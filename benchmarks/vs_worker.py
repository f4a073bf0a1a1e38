"""Our side of the comparison: the runner by itself, without tokenising, sampling or scheduling.

A process of its own, without a model, reads memory. Obeys commands (vs_protocol.py); compares
nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numba
import numpy as np
from vs_protocol import Facts, memory_facts, serve

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from hypocenter import __version__
from hypocenter.cli.verbs import bench
from hypocenter.device.cpu import lang, threads, vector
from hypocenter.device.cpu.vector_ir import LANES
from hypocenter.engine.runner import load_runner
from hypocenter.model.gguf.file import open_gguf
from hypocenter.settings.config import EngineConfig

READ_BYTES = 512 << 20
NUM_READ_PASSES = 10
NUM_STREAMS = 4

Array = np.ndarray[Any, Any]


class Ours:
    """One model in hypocenter, whose one sequence has blocks 0, 1, 2 ... of the cache."""

    def load(
        self, path: str, num_threads: int, context_length: int, batch: int, kv_dtype: str,
        float_products: str,
    ) -> Facts:  # fmt: skip
        config = EngineConfig(
            context_length=context_length, num_threads=num_threads, max_batch_tokens=batch,
            kv_dtype=kv_dtype, float_products=float_products,
        )  # fmt: skip
        self.file = open_gguf(path)
        self.runner = load_runner(self.file, config)
        return self.facts()

    def facts(self) -> Facts:
        """What the runner says it executed, and the types of the weights that it holds."""
        route = self.runner.route()
        number = self.file.integer("general.file_type", low=0, high=1 << 10)
        name = gguf.LlamaFileType(number).name
        return {
            "engine": f"hypocenter {__version__}",
            "file_type": name.removeprefix("MOSTLY_").removeprefix("ALL_"),
            "main_dtype": main_dtype(self.runner.weights),
            "num_threads": route.num_threads,
            "context_length": self.runner.context_length,
            "batch": self.runner.max_batch_tokens,
            "kv_dtype": route.kv_dtype,
            "float_products": "bf16" if route.activation_dtype == "BF16" else "exact",
            "instructions": route.instruction_set,
            "kernels": list(route.kernels),
        }

    def prefill(self, tokens: list[int]) -> Facts:
        """One prompt from position 0 on, logits for its last token."""
        return self._run(tokens, 0, self.runner.max_batch_tokens)

    def decode(self, tokens: list[int], depth: int, num_warm: int = 0) -> Facts:
        """One token at a time behind the `depth` tokens that are in the cache already; the first
        `num_warm` of them once before, which does not count."""
        if num_warm:
            self._run(tokens[:num_warm], depth, 1)
        return self._run(tokens, depth, 1)

    def _run(self, tokens: list[int], depth: int, chunk: int) -> Facts:
        ids = np.array(tokens, np.int32)
        num_tokens, counts = 0, self.runner._inputs.counts.data
        steps = [
            bench.batch_of(ids[at : at + chunk], depth + at, self.runner)
            for at in range(0, len(ids), chunk)
        ]
        started = time.perf_counter()
        for step in steps:
            self.runner.run(step)
            num_tokens += int(counts[0])  # as the kernels of this step were told
        seconds = time.perf_counter() - started
        num_threads = self.runner.route().num_threads
        return {"num_tokens": num_tokens, "seconds": seconds, "num_threads": num_threads}

    def logits(self, tokens: list[int], out: str) -> Facts:
        """Write the logits after each token, f32 [num_tokens, vocab_size], to `out`."""
        batch = bench.batch_of(np.array(tokens, np.int32), 0, self.runner)
        batch = replace(batch, logit_rows=np.arange(len(tokens), dtype=np.int32))
        np.save(out, np.array(self.runner.run(batch).data))
        num_tokens = int(self.runner._inputs.counts.data[0])
        return {"num_tokens": num_tokens, "num_threads": self.runner.route().num_threads}


def main_dtype(weights: Any) -> str:
    """The type that most bytes of a model's matrices are in."""
    matrices = [matrix for layer in weights.layers for matrix in layer.matrices]
    tensors = {id(one): one for one in (*matrices, weights.token_table, weights.output)}
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        num_bytes = tensor.num_elements // tensor.dtype.block_elements * tensor.dtype.block_bytes
        sizes[tensor.dtype.name] = sizes.get(tensor.dtype.name, 0) + num_bytes
    return max(sizes, key=lambda name: sizes[name])


def bandwidth(num_threads: int) -> Facts:
    """Bytes per second of reading memory, by two ways of reading, ten passes each.

    The figure is a limit for others to be measured by, so the faster way counts: `sustained` is
    what half of its passes reach, and `best` that of the fastest pass. A decode lasts as long as
    many passes and is no faster than what memory gives for that long.
    """
    values = _memory()
    passes = {"by_kernel": read_by_kernel(num_threads, values),
              "by_numpy": read_by_numpy(num_threads, values)}  # fmt: skip
    medians = {way: statistics.median(speeds) for way, speeds in passes.items()}
    best = max(max(speeds) for speeds in passes.values())
    return {**medians, "sustained": max(medians.values()), "best": best}


@cache
def _memory() -> Array:
    """What is read, f32; kept, so that no reading between two runs begins with page faults."""
    return np.ones(READ_BYTES // 4, np.float32)


def read_by_kernel(num_threads: int, values: Array) -> list[float]:
    """With a loop in the words and the thread pool that the kernels use."""
    threads.set_num_threads(num_threads)
    step = 4 * num_threads * NUM_STREAMS * LANES
    values = values[: len(values) // step * step]
    sums = np.zeros((num_threads, LANES), np.float32)
    _read(values[:step], sums)  # compiles
    return _speeds(values.nbytes, lambda: _read(values, sums))


def read_by_numpy(num_threads: int, values: Array) -> list[float]:
    """With numpy's sum, which lets go of the interpreter, in threads that end with the reading."""
    parts = np.array_split(values.view(np.uint64), num_threads)
    with ThreadPoolExecutor(num_threads) as pool:
        return _speeds(values.nbytes, lambda: list(pool.map(np.sum, parts)))


def _speeds(num_bytes: int, read: Callable[[], object]) -> list[float]:
    """Bytes per second of each pass."""
    speeds = []
    for _ in range(NUM_READ_PASSES):
        started = time.perf_counter()
        read()
        speeds.append(num_bytes / (time.perf_counter() - started))
    return speeds


@numba.njit(parallel=True, nogil=True)  # type: ignore[untyped-decorator]
def _read(values: Any, sums: Any) -> None:
    """Add up values [num_threads * NUM_STREAMS * length] into sums [num_threads, 16].

    Each thread reads NUM_STREAMS stretches side by side: 1 gave 44 GB/s where 4 gave 51.
    """
    length = values.shape[0] // (sums.shape[0] * NUM_STREAMS)
    for part in lang.prange(sums.shape[0]):
        a = b = c = d = vector.splat(np.float32(0))
        first = part * NUM_STREAMS * length
        for column in range(0, length, 4 * LANES):
            for stream in range(NUM_STREAMS):
                at = first + stream * length + column
                a = vector.add(a, vector.load(values, at))
                b = vector.add(b, vector.load(values, at + 16))
                c = vector.add(c, vector.load(values, at + 32))
                d = vector.add(d, vector.load(values, at + 48))
        vector.store(sums, part * LANES, vector.add(vector.add(a, b), vector.add(c, d)))


def main() -> None:
    ours = Ours()
    serve(
        {
            "load": ours.load, "facts": ours.facts, "prefill": ours.prefill,
            "decode": ours.decode, "logits": ours.logits, "memory": memory_facts,
            "bandwidth": bandwidth,
        }
    )  # fmt: skip


if __name__ == "__main__":
    main()
