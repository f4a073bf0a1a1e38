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
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hypocenter.base.dtypes import Float32s
from hypocenter.base.errors import UsageError
from hypocenter.cli import measured_drafts
from hypocenter.cli.answer import open_llm
from hypocenter.cli.output import say, show, show_json
from hypocenter.cli.progress import ProgressDisplay
from hypocenter.cli.tool_options import BenchOptions
from hypocenter.device import devices
from hypocenter.engine.batch import Batch
from hypocenter.engine.state_ledger import BatchStates
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.settings.config import EngineConfig

if TYPE_CHECKING:
    from hypocenter.base.results import Route
    from hypocenter.engine.llm import LLM
    from hypocenter.engine.runner import Runner

#: What is read to measure the memory of a CPU: so many times its caches, within these bounds.
TIMES_CACHES = 4
LEAST_READ_BYTES, MOST_READ_BYTES = 256 << 20, 2 << 30
NUM_READ_PASSES = 10
TOKEN_SEED = 0
NUM_WARM_UPS = 2


@dataclass(frozen=True)
class Measurement:
    """One test: `name` as llama-bench writes it, tokens per second of each repetition.

    Of `num_sequences` at once all tokens count, and each step reads the weights once.
    """

    name: str
    num_tokens: int
    depth: int
    num_sequences: int
    tokens_per_second: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.tokens_per_second)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.tokens_per_second) if len(self.tokens_per_second) > 1 else 0.0


@dataclass(frozen=True)
class ModelSize:
    """What the left columns say. `bytes_per_token`: the weights that a token reads."""

    name: str
    num_bytes: int
    num_params: int
    bytes_per_token: int


def bench(path: str, options: BenchOptions, config: EngineConfig, *, as_json: bool) -> None:
    """Measure and print. Raises UsageError when the tests do not fit into the context."""
    num_sequences = max(options.num_sequences)
    needed = max(options.depth) + max(*options.num_prompt, options.num_generate)
    needed = max(needed, num_sequences * _room(max(options.depth) + options.num_generate, config))
    if config.tries_tokens:
        needed = max(needed, measured_drafts.num_positions(options.num_generate))
    with open_gguf(path, config.override_kv) as file:
        model = model_size(file)
        arch = read_architecture(file, config.pooling)
    if needed > arch.context_length:
        raise UsageError(
            f"the tests need {needed} positions, but {arch.length_text}; lower -p, -n, -d or -np"
        )
    if config.context_length is None:
        config = replace(config, context_length=needed)
    if config.kv_tokens is None:
        config = replace(config, kv_tokens=max(needed, config.context_length or 0))
    config = replace(config, max_batch_requests=max(num_sequences, config.max_batch_requests))
    began = time.perf_counter()
    with ProgressDisplay() as progress, open_llm(path, config, progress) as llm:
        load_seconds = time.perf_counter() - began
        runner = llm.engine.runner
        if needed > runner.context_length:
            raise UsageError(
                f"the tests need {needed} positions, but the context has {runner.context_length}; "
                "lower -p, -n, -d or -np, or raise -c"
            )
        results = list(_measure(runner, options, progress))
        pairs = list(_measure_drafts(llm, options, progress))
        route = runner.route()
        progress("measuring memory bandwidth", 0.0)
        bandwidth = bandwidth_of(route)
        progress.clear()
        if as_json:
            found = as_object(model, results, bandwidth, route, load_seconds)
            show_json(found | {"spec": [pair.as_object() for pair in pairs]})
        else:
            show(table(model, results, bandwidth, route.device, route.num_threads))
            for line in remarks(model, results, bandwidth, route, load_seconds):
                say(line)
            for pair in pairs:
                say(pair.text)


def model_size(file: GGUFFile) -> ModelSize:
    """Read from the tensors. The embedding is read whole only where it is the output head too, and
    that of single layers never; of the experts a token reads those that it takes."""
    infos = file.tensors.values()
    by_type: dict[str, int] = {}
    for info in infos:
        by_type[info.dtype.name] = by_type.get(info.dtype.name, 0) + info.num_bytes
    embedding = file.tensors.get("token_embd.weight")
    by_rows = embedding.num_bytes if embedding and "output.weight" in file.tensors else 0
    if of_layers := file.tensors.get("per_layer_token_embd.weight"):
        by_rows += of_layers.num_bytes
    num_bytes = sum(info.num_bytes for info in infos)
    arch = file.text("general.architecture", default="unknown", max_bytes=64)
    stacks = sum(info.num_bytes for info in infos if len(info.shape) == 3)
    num_experts = file.integer(f"{arch}.expert_count", 1, low=1) if stacks else 1
    num_used = file.integer(f"{arch}.expert_used_count", num_experts, low=1, high=num_experts)
    return ModelSize(
        name=f"{arch} {max(by_type, key=lambda name: by_type[name])}",
        num_bytes=num_bytes,
        num_params=sum(math.prod(info.shape) for info in infos),
        bytes_per_token=num_bytes - by_rows - stacks * (num_experts - num_used) // num_experts,
    )


def bandwidth_of(route: Route) -> float | None:
    """Bytes per second of the memory that holds the weights; None where that is a simulation.

    Of a GPU what a copy reads and writes, measured there; of a CPU what its threads read.
    """
    if route.device == "cpu":
        return read_bandwidth(route.num_threads, read_bytes())
    return devices.backend_of(route.device).copy_bandwidth()


def remarks(
    model: ModelSize,
    results: list[Measurement],
    bandwidth: float | None,
    route: Route,
    load_seconds: float,
) -> list[str]:
    """What stands below the table: what the shares are of, and what has none."""
    lines = [f"loaded in {load_seconds:.2f} s, with what was compiled then"]
    if bandwidth is None:
        return [*lines, f"{route.device} is simulated: its speed says nothing of a GPU"]
    how = (
        f"read by {route.num_threads} threads" if route.device == "cpu" else "copied on the device"
    )
    lines.append(
        f"memory bandwidth {bandwidth / 1e9:.1f} GB/s, {how}; a step of decoding reads "
        f"{model.bytes_per_token / 1e6:.1f} MB of weights ({route.weight_dtype} times "
        f"{route.activation_dtype}, {route.instruction_set})"
    )
    if any(_share(model, result, bandwidth) > 1 for result in results if _is_decode(result)):
        lines.append("no share where the weights come faster than memory gives them: from caches")
    return lines


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
    model: ModelSize,
    results: list[Measurement],
    bandwidth: float | None,
    device: str,
    num_threads: int,
) -> str:
    """Markdown with the columns of llama-bench and one more."""
    header = ("model", "size", "params", "backend", "threads", "test", "t/s", "of bandwidth")
    rows = [header]
    for result in results:
        share = bandwidth_share(model, result, bandwidth)
        rows.append(
            (
                model.name,
                f"{model.num_bytes / 2**20:.2f} MiB"
                if model.num_bytes < 2**30
                else f"{model.num_bytes / 2**30:.2f} GiB",
                f"{model.num_params / 1e6:.2f} M"
                if model.num_params < 1e9
                else f"{model.num_params / 1e9:.2f} B",
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


def bandwidth_share(model: ModelSize, result: Measurement, bandwidth: float | None) -> float | None:
    """Share of `bandwidth` (bytes/s) that reading each weight once a step takes.

    None for prompts, and above 1: then the weights did not come from memory, or the figure lies.
    """
    if bandwidth is None or not _is_decode(result):
        return None
    share = _share(model, result, bandwidth)
    return share if share <= 1 else None


def _is_decode(result: Measurement) -> bool:
    return result.name.startswith("tg")


def _share(model: ModelSize, result: Measurement, bandwidth: float) -> float:
    return result.mean / result.num_sequences * model.bytes_per_token / bandwidth


def batch_of(
    token_ids: np.ndarray[Any, Any],
    start: int,
    runner: Runner,
    first_block: int = 0,
    state_slot: int = 0,
) -> Batch:
    """A chunk of one sequence from position `start` on, whose blocks begin with `first_block`; and
    its slot, where layers carry a state."""
    positions = np.arange(start, start + len(token_ids), dtype=np.int32)
    num_blocks = -(-runner.context_length // runner.block_size) - first_block
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slots=positions + first_block * runner.block_size,
        sequence_rows=np.zeros(len(token_ids), np.int32),
        block_tables=np.arange(first_block, first_block + num_blocks, dtype=np.int32)[None, :],
        logit_rows=np.array([len(token_ids) - 1], np.int32),
        states=BatchStates.own((state_slot,), np.array([state_slot], np.int32)),
        adapter_scales=_scales_of(runner, 1),
    )


def batch_of_sequences(
    token_ids: np.ndarray[Any, Any], position: int, runner: Runner, room: int
) -> Batch:
    """A token of each sequence, all at `position`; each has `room` positions, whole blocks."""
    num = len(token_ids)
    firsts = np.arange(num, dtype=np.int32) * np.int32(room)
    blocks = np.arange(room // runner.block_size, dtype=np.int32)
    return Batch(
        token_ids=token_ids,
        positions=np.full(num, position, np.int32),
        slots=firsts + np.int32(position),
        sequence_rows=np.arange(num, dtype=np.int32),
        block_tables=firsts[:, None] // np.int32(runner.block_size) + blocks,
        logit_rows=np.arange(num, dtype=np.int32),
        states=BatchStates.own(tuple(range(num)), np.arange(num, dtype=np.int32)),
        adapter_scales=_scales_of(runner, num),
    )


def _scales_of(runner: Runner, num: int) -> Float32s | None:
    """What adapters count for each of so many sequences, as they were given."""
    scales = runner.adapters.scales(None) if runner.adapters is not None else ()
    return np.tile(np.array(scales, np.float32), (num, 1)) if scales else None


def _measure(
    runner: Runner, options: BenchOptions, progress: ProgressDisplay
) -> Iterator[Measurement]:
    random = np.random.default_rng(TOKEN_SEED)
    for depth in options.depth:
        at = f" @ d{depth}" if depth else ""

        def fill(num: int = 1, room: int = 0, depth: int = depth) -> None:
            for sequence in range(num):
                first_block = sequence * (room // runner.block_size)
                _feed(runner, _tokens(random, runner, depth), 0, first_block, sequence)

        fill()
        for num_tokens in filter(None, options.num_prompt):

            def read(num_tokens: int = num_tokens, depth: int = depth) -> None:
                _feed(runner, _tokens(random, runner, num_tokens), depth)

            name = f"pp{num_tokens}{at}"
            speeds = _repeat(name, runner, fill, read, options, num_tokens, progress)
            yield Measurement(name, num_tokens, depth, 1, speeds)
        for num in options.num_sequences if options.num_generate else ():
            room = _room(depth + options.num_generate, runner.config)
            refill = partial(fill, num, room)
            refill()

            def decode(num: int = num, depth: int = depth, room: int = room) -> None:
                for position in range(depth, depth + options.num_generate):
                    tokens = _tokens(random, runner, num)
                    runner.run(batch_of_sequences(tokens, position, runner, room))

            num_tokens = num * options.num_generate
            name = f"tg{options.num_generate}{f' x{num}' if num > 1 else ''}{at}"
            speeds = _repeat(name, runner, refill, decode, options, num_tokens, progress)
            yield Measurement(name, num_tokens, depth, num, speeds)


def _measure_drafts(
    llm: LLM, options: BenchOptions, progress: ProgressDisplay
) -> Iterator[measured_drafts.Pairs]:
    """What drafts gain, where the model was opened with some."""
    if llm.engine.runner.config.tries_tokens and options.num_generate:
        yield from measured_drafts.measure(llm, options.num_generate, options.repetitions, progress)
        progress.clear()


def _room(num_positions: int, config: EngineConfig) -> int:
    """So many positions as whole blocks of the cache."""
    return -(-num_positions // config.block_size) * config.block_size


def _repeat(
    name: str,
    runner: Runner,
    fill: Callable[[], None],
    once: Callable[[], None],
    options: BenchOptions,
    num_tokens: int,
    progress: ProgressDisplay,
) -> tuple[float, ...]:
    """Tokens per second of each repetition, after two that warm up and are not counted.

    A plan is compiled when it runs first, and captured as a graph when it runs again. The clock
    stops when the device has done the work, and not when it has been told of it. A cache can be
    written to again from any position on; a state goes on from where it stands, so `fill` brings it
    there each time.
    """
    speeds = []
    for repetition in range(-NUM_WARM_UPS, options.repetitions):
        progress(name, (repetition + NUM_WARM_UPS) / (options.repetitions + NUM_WARM_UPS))
        if runner.num_state_slots:
            fill()
        runner.wait()
        started = time.perf_counter()
        once()
        runner.wait()
        if repetition >= 0:
            speeds.append(num_tokens / (time.perf_counter() - started))
    progress.clear()
    return tuple(speeds)


def _tokens(random: np.random.Generator, runner: Runner, num: int) -> np.ndarray[Any, Any]:
    return random.integers(0, runner.vocab_size, num, dtype=np.int32)


def _feed(
    runner: Runner,
    token_ids: np.ndarray[Any, Any],
    start: int,
    first_block: int = 0,
    state_slot: int = 0,
) -> None:
    chunk = runner.max_batch_tokens
    for at in range(0, len(token_ids), chunk):
        part = token_ids[at : at + chunk]
        runner.run(batch_of(part, start + at, runner, first_block, state_slot))


def read_bytes() -> int:
    """What is too much for caches, and at most half of the memory that is free, so that measuring
    pushes nothing out."""
    from hypocenter.cli.machine import cache_bytes, memory

    caches = cache_bytes() or MOST_READ_BYTES
    wanted = min(max(TIMES_CACHES * caches, LEAST_READ_BYTES), MOST_READ_BYTES)
    available = memory()["available_bytes"]
    return wanted if available is None else min(wanted, max(available // 2, 1 << 20))


def as_object(
    model: ModelSize,
    results: list[Measurement],
    bandwidth: float | None,
    route: Route,
    load_seconds: float,
) -> dict[str, Any]:
    """What `--json` prints; `bandwidth` in bytes per second, null of a simulated GPU."""
    tests = [
        {
            **asdict(result),
            "mean": result.mean,
            "deviation": result.deviation,
            "bandwidth_share": bandwidth_share(model, result, bandwidth),
        }
        for result in results
    ]
    return {
        "model": model,
        "load_seconds": load_seconds,
        "bytes_per_second": bandwidth,
        "route": route,
        "tests": tests,
    }
