"""`hypo bench`: tokens per second of prompt and generation, as a table like that of llama-bench.

Drives the runner itself, so that the time holds no tokenising, sampling or scheduling. The random
tokens and the columns follow llama-bench; the share of memory bandwidth is an addition.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hypocenter.cli.answer import open_llm
from hypocenter.cli.options import BenchOptions
from hypocenter.cli.output import say, show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.config import EngineConfig
from hypocenter.engine.batch import Batch
from hypocenter.errors import UsageError
from hypocenter.model.architecture import read_architecture
from hypocenter.model.gguf.file import GGUFFile, open_gguf

if TYPE_CHECKING:
    from hypocenter.engine.runner import Runner
    from hypocenter.results import Route

READ_BYTES = 2 << 30
NUM_READ_PASSES = 10
TOKEN_SEED = 0


@dataclass(frozen=True)
class Measurement:
    """One test: `name` as llama-bench writes it, tokens per second of each repetition."""

    name: str
    num_tokens: int
    depth: int
    tokens_per_second: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.tokens_per_second)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.tokens_per_second) if len(self.tokens_per_second) > 1 else 0.0


@dataclass(frozen=True)
class ModelFacts:
    """What the left columns say. `bytes_per_token`: the weights that every token reads."""

    name: str
    num_bytes: int
    num_params: int
    bytes_per_token: int


def bench(path: str, options: BenchOptions, config: EngineConfig, *, as_json: bool) -> None:
    """Measure and print. Raises UsageError when the tests do not fit into the context."""
    needed = max(options.depth) + max(options.num_prompt, options.num_generate)
    with open_gguf(path) as file:
        facts = model_facts(file)
        trained = read_architecture(file).context_length
    if needed > trained:
        raise UsageError(
            f"the tests need {needed} positions, but the model was trained for {trained}; "
            "lower -p, -n or -d"
        )
    if config.context_length is None:
        config = replace(config, context_length=needed)
    with ProgressDisplay() as progress, open_llm(path, config, progress) as llm:
        runner = llm.engine.runner
        if needed > runner.context_length:
            raise UsageError(
                f"the tests need {needed} positions, but the context has {runner.context_length}; "
                "lower -p, -n or -d, or raise -c"
            )
        results = list(_measure(runner, options, progress))
        route = runner.route()
        progress("measuring memory bandwidth", 0.0)
        bandwidth = read_bandwidth(route.num_threads, min(READ_BYTES, _spare_bytes()))
        progress.clear()
        if as_json:
            show_json(as_object(facts, results, bandwidth, route))
        else:
            show(table(facts, results, bandwidth, route.device, route.num_threads))
            say(
                f"memory bandwidth {bandwidth / 1e9:.1f} GB/s by {route.num_threads} threads; a "
                f"token reads {facts.bytes_per_token / 1e6:.1f} MB of weights ({route.weight_dtype}"
                f" times {route.activation_dtype}, {route.instruction_set}); above 100 %: they "
                "stay in the CPU's caches"
            )


def model_facts(file: GGUFFile) -> ModelFacts:
    """Read from the tensors. The embedding is read whole only where it is the output head too."""
    infos = file.tensors.values()
    by_type: dict[str, int] = {}
    for info in infos:
        by_type[info.dtype.name] = by_type.get(info.dtype.name, 0) + info.num_bytes
    embedding = file.tensors.get("token_embd.weight")
    untied = embedding.num_bytes if embedding and "output.weight" in file.tensors else 0
    num_bytes = sum(info.num_bytes for info in infos)
    arch = file.text("general.architecture", default="unknown", max_bytes=64)
    return ModelFacts(
        name=f"{arch} {max(by_type, key=lambda name: by_type[name])}",
        num_bytes=num_bytes,
        num_params=sum(math.prod(info.shape) for info in infos),
        bytes_per_token=num_bytes - untied,
    )


def read_bandwidth(num_threads: int, num_bytes: int) -> float:
    """Bytes per second of reading `num_bytes` of memory once: the best of ten passes."""
    parts = np.array_split(np.ones(num_bytes // 8, np.uint64), num_threads)
    best = math.inf
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(NUM_READ_PASSES):
            started = time.perf_counter()
            # numpy lets go of the interpreter while it sums, so that the threads run side by side.
            list(pool.map(np.sum, parts))
            best = min(best, time.perf_counter() - started)
    return num_bytes / best


def table(
    facts: ModelFacts,
    results: list[Measurement],
    bandwidth: float,
    device: str,
    num_threads: int,
) -> str:
    """Markdown with the columns of llama-bench and one more."""
    header = ("model", "size", "params", "backend", "threads", "test", "t/s", "of bandwidth")
    rows = [header]
    for result in results:
        share = bandwidth_share(facts, result, bandwidth)
        rows.append(
            (
                facts.name,
                f"{facts.num_bytes / 2**20:.2f} MiB"
                if facts.num_bytes < 2**30
                else f"{facts.num_bytes / 2**30:.2f} GiB",
                f"{facts.num_params / 1e6:.2f} M"
                if facts.num_params < 1e9
                else f"{facts.num_params / 1e9:.2f} B",
                device.upper(),
                str(num_threads),
                result.name,
                f"{result.mean:.2f} ± {result.deviation:.2f}",
                "" if share is None else f"{share:.0%}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    # Text to the left, figures to the right, as in llama-bench.
    rules = [
        "-" * (width + 1) + ("-" if column in (0, 3) else ":")
        for column, width in enumerate(widths)
    ]
    return "\n".join([lines[0], "|" + "|".join(rules) + "|", *lines[1:]])


def bandwidth_share(facts: ModelFacts, result: Measurement, bandwidth: float) -> float | None:
    """Share of `bandwidth` (bytes/s) that reading each weight once a token takes; None for pp."""
    if not result.name.startswith("tg"):
        return None
    return result.mean * facts.bytes_per_token / bandwidth


def batch_of(token_ids: np.ndarray[Any, Any], start: int, runner: Runner) -> Batch:
    """A chunk of one sequence that lies in blocks 0, 1, 2 ... from position `start` on."""
    positions = np.arange(start, start + len(token_ids), dtype=np.int32)
    num_blocks = -(-runner.context_length // runner.block_size)
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=positions.copy(),  # block b holds the slots from b * block_size on
        sequence_rows=np.zeros(len(token_ids), np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None, :],
        logit_rows=np.array([len(token_ids) - 1], np.int32),
    )


def _measure(
    runner: Runner, options: BenchOptions, progress: ProgressDisplay
) -> Iterator[Measurement]:
    random = np.random.default_rng(TOKEN_SEED)
    tests: list[tuple[str, int, int]] = [
        ("pp", options.num_prompt, runner.max_batch_tokens),
        ("tg", options.num_generate, 1),
    ]
    for depth in options.depth:
        _feed(runner, _tokens(random, runner, depth), 0, runner.max_batch_tokens)
        for kind, num_tokens, chunk in tests:
            if not num_tokens:
                continue
            name = f"{kind}{num_tokens}" + (f" @ d{depth}" if depth else "")

            def once(num_tokens: int = num_tokens, chunk: int = chunk, depth: int = depth) -> None:
                _feed(runner, _tokens(random, runner, num_tokens), depth, chunk)

            speeds = _repeat(name, once, options, num_tokens, progress)
            yield Measurement(name, num_tokens, depth, speeds)


def _repeat(
    name: str,
    once: Callable[[], None],
    options: BenchOptions,
    num_tokens: int,
    progress: ProgressDisplay,
) -> tuple[float, ...]:
    """Tokens per second of each repetition, after one that warms up and is not counted."""
    speeds = []
    for repetition in range(options.repetitions + 1):
        progress(name, repetition / (options.repetitions + 1))
        started = time.perf_counter()
        once()
        if repetition:
            speeds.append(num_tokens / (time.perf_counter() - started))
    progress.clear()
    return tuple(speeds)


def _tokens(random: np.random.Generator, runner: Runner, num: int) -> np.ndarray[Any, Any]:
    return random.integers(0, runner.vocab_size, num, dtype=np.int32)


def _feed(runner: Runner, token_ids: np.ndarray[Any, Any], start: int, chunk: int) -> None:
    for at in range(0, len(token_ids), chunk):
        runner.run(batch_of(token_ids[at : at + chunk], start + at, runner))


def _spare_bytes() -> int:
    """Half of the memory that is free, so that measuring pushes nothing out."""
    from hypocenter.cli.machine import memory

    available = memory()["available_bytes"]
    return READ_BYTES if available is None else max(available // 2, 1 << 20)


def as_object(
    facts: ModelFacts, results: list[Measurement], bandwidth: float, route: Route
) -> dict[str, Any]:
    """What `--json` prints; `bandwidth` in bytes per second."""
    tests = [
        {
            **asdict(result),
            "mean": result.mean,
            "deviation": result.deviation,
            "bandwidth_share": bandwidth_share(facts, result, bandwidth),
        }
        for result in results
    ]
    return {"model": facts, "bytes_per_second": bandwidth, "route": route, "tests": tests}
