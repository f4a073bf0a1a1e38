"""What launches, guards and a decode step cost on a real GPU, and what its memory can do.

Imports torch directly: it measures the device from outside the doors, with events and copies.
"""

from __future__ import annotations

import gc
import inspect
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from gpu_model import large_weight, large_weights, llama_8b

from hypocenter.base.errors import HypoError
from hypocenter.base.tensor import DType, Tensor
from hypocenter.device import copies, devices, launch, memory
from hypocenter.device.plan import PlanBuilder
from hypocenter.kernels.attention import attention, rope, rope_write
from hypocenter.kernels.linear import linear
from hypocenter.kernels.rowwise import norm
from hypocenter.settings.config import LAUNCH_MODES

GIB = 1 << 30
COPY_BYTES = 2 * GIB
#: As many launches between two waits as fit the queue of a GPU with room to spare.
BURST, NUM_BURSTS = 200, 25


class JitRecorder(PlanBuilder):
    """A plan builder that also keeps the Triton kernel of each launch."""

    def __init__(self, num_rows: int, device: str) -> None:
        super().__init__(num_rows, device)
        self.jits: list[Any] = []

    def add_gpu(self, jit: Any, *args: Any, **keywords: Any) -> None:
        super().add_gpu(jit, *args, **keywords)
        self.jits.append(jit)


# Memory.


def bandwidth(device: str) -> dict[str, Any]:
    """Bytes per second of a copy (read and written bytes counted) and of reading, best of ten."""
    import torch

    devices.open_device(device)
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    numbers = source.view(torch.int32)
    copy_s = min(event_seconds(lambda: target.copy_(source), 10))
    read_s = min(event_seconds(lambda: torch.sum(numbers, dtype=torch.int32), 10))
    return {
        "ok": True,
        "buffer_bytes": COPY_BYTES,
        "copy_bytes_per_s": 2 * COPY_BYTES / copy_s,
        "read_bytes_per_s": COPY_BYTES / read_s,
    }


# Launches.


def overhead(device: str) -> dict[str, Any]:
    """Host microseconds per launch of one small kernel: Triton alone, and through the door.

    The targets: off within noise of Triton alone, checked at most 0.5 us per tensor more.
    """
    from hypocenter.device.guard.launches import GuardedLaunches

    backend: Any = devices.backend_of(devices.open_device(device))
    plan, num_tensors = _small_norm(device)
    prepared, jit = plan.launches[0], plan.jits[0]
    args, options = prepared.args, dict(prepared.options)
    grid = options.pop("grid")
    launcher = backend.launcher(jit)
    ways: dict[str, Callable[[], Any]] = {
        "triton": lambda: jit[grid](*args, **options),
        "launcher": lambda: launcher(*args, grid=grid, **options),
        "door_off": prepared.run,
        "triton_again": lambda: jit[grid](*args, **options),
    }
    figures = {name: _host_us(way, backend) for name, way in ways.items()}
    modes: dict[str, float | str] = {}
    for mode in (mode for mode in LAUNCH_MODES if mode != "off"):
        try:
            if mode == "guarded":
                GuardedLaunches(device, [prepared])
            else:
                prepared.set_mode(mode)
            modes[mode] = _host_us(prepared.run, backend, num_bursts=5)
        except HypoError as error:
            modes[mode] = f"not present: {error}"
    prepared.set_mode("off")
    facts = prepared.facts
    figures["contract_check"] = _host_us(lambda: prepared.contract.check(**facts), backend)
    figures["with_launch_log"] = _logged_us(backend, jit, args, grid, options)
    graph = backend.capture(lambda: [prepared.run() for _ in range(BURST)])
    per_graph = statistics.median(event_seconds(graph, 20))
    noise = abs(figures["triton_again"] - figures["triton"])
    return {
        "ok": figures["door_off"] <= figures["triton"] + max(noise, 0.5),
        "host_us_per_launch": figures,
        "host_us_per_launch_by_mode": modes,
        "check_us_per_tensor": figures["contract_check"] / num_tensors,
        "device_us_per_launch_in_a_graph": per_graph / BURST * 1e6,
        "noise_us": noise,
    }


def _small_norm(device: str) -> tuple[JitRecorder, int]:
    def put(name: str, *shape: int, dtype: DType = DType.F32) -> Tensor:
        return memory.allocate(name, "benchmark", dtype, shape, device=device)

    plan, x = JitRecorder(1, device), put("x", 1, 64)
    counts = put("counts", 2, dtype=DType.I32)
    norm.rms_norm(plan, x, put("weight", 64), 1e-5, put("out", 1, 64), counts, width=64)
    return plan, 4


def _logged_us(backend: Any, jit: Any, args: Any, grid: Any, options: dict[str, Any]) -> float:
    """The launch log line included, written to nowhere."""
    log = logging.getLogger("hypocenter.gpu")
    before, handler = log.level, logging.NullHandler()
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        launcher = backend.launcher(jit)
        return _host_us(lambda: launcher(*args, grid=grid, **options), backend, num_bursts=5)
    finally:
        log.propagate = True
        log.setLevel(before)
        log.removeHandler(handler)


def _host_us(run: Callable[[], Any], backend: Any, num_bursts: int = NUM_BURSTS) -> float:
    """Median over bursts of the host's time per call, the waiting left out."""
    run()
    backend.synchronise()
    times = []
    for _ in range(num_bursts):
        started = time.perf_counter()
        for _ in range(BURST):
            run()
        times.append((time.perf_counter() - started) / BURST)
        backend.synchronise()
    return statistics.median(times) * 1e6


# Guards.


def guard_cost(device: str) -> dict[str, Any]:
    """Guarded against plain kernels at the sizes of a decode step: time, and equal bits."""
    backend: Any = devices.backend_of(devices.open_device(device))
    rows = []
    for label, plan in _decode_kernels(device):
        for jit, prepared in zip(plan.jits, plan.launches, strict=True):
            try:
                rows.append({"case": label} | _guarded(backend, jit, prepared))
            except Exception as error:  # one kernel's refusal is that kernel's row
                problem = f"{type(error).__name__}: {error}"[:400]
                rows.append({"case": label, "kernel": prepared.kernel, "problem": problem})
    good = [row for row in rows if "problem" not in row]
    return {
        "ok": len(good) == len(rows) and all(row["same_bits"] for row in good),
        "worst_ratio": max((row["ratio"] for row in good), default=None),
        "kernels": rows,
    }


def _guarded(backend: Any, jit: Any, prepared: launch.Launch) -> dict[str, Any]:
    import torch

    from hypocenter.device.guard.guard import guard

    names = list(inspect.signature(jit.fn).parameters)
    arguments = dict(zip(names, prepared.args, strict=False))
    tensors = {n: a for n, a in arguments.items() if isinstance(a, torch.Tensor)}
    guarded = guard(jit, tensors)
    address = backend.allocate(8 * guarded.num_slots)  # a graph takes no memory but the device's
    slots = backend.argument(address, DType.I64, guarded.num_slots)
    slots.zero_()
    extra = {**guarded.extents(arguments), "guard__slots": slots}
    launcher = backend.launcher(guarded.fn)

    def run_guarded() -> None:
        launcher(*prepared.args, **prepared.options, **extra)

    before = {name: tensor.clone() for name, tensor in tensors.items()}
    results = []
    for run in (prepared.run, run_guarded):
        for name, tensor in tensors.items():
            tensor.copy_(before[name])
        run()
        results.append({name: tensor.clone() for name, tensor in tensors.items()})
    backend.synchronise()
    same = all(_same_bits(results[0][name], results[1][name]) for name in tensors)
    plain_s, guarded_s = (_graph_seconds(backend, run) for run in (prepared.run, run_guarded))
    return {
        "kernel": prepared.kernel,
        "plain_us": plain_s * 1e6,
        "guarded_us": guarded_s * 1e6,
        "ratio": guarded_s / plain_s,
        "same_bits": same and not bool(slots.any()),
    }


def _same_bits(a: Any, b: Any) -> bool:
    import torch

    return bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def _decode_kernels(device: str) -> list[tuple[str, JitRecorder]]:
    """The kernels of one decode step of an 8B-shaped model at position 2047."""

    def put(name: str, values: np.ndarray[Any, Any], dtype: DType = DType.F32) -> Tensor:
        made = memory.allocate(name, "benchmark", dtype, values.shape, device=device)
        copies.to_device(made, values)
        return made

    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np.float32)

    counts = put("counts", np.array([1, 1], np.int32), DType.I32)
    x, wide = put("x", normal(1, 4096)), put("out", np.zeros((1, 14336), np.float32))
    found: list[tuple[str, JitRecorder]] = []

    def add(label: str, build: Callable[[PlanBuilder], None]) -> None:
        plan = JitRecorder(1, device)
        build(plan)
        found.append((label, plan))

    weight = put("weight", normal(4096))
    add("rms_norm 4096", lambda p: norm.rms_norm(p, x, weight, 1e-5, x, counts, width=4096))
    cos, sin = rope.tables(2048, 128, 500000.0)
    table = put("cos", cos), put("sin", sin)
    positions = put("positions", np.array([2047], np.int32), DType.I32)
    for dtype in (DType.F16, DType.Q8_0, DType.Q4_0, DType.Q4_K):
        matrix = large_weight(dtype, 14336, 4096, device)
        add(
            f"linear {dtype.name} 14336 x 4096",
            lambda p, m=matrix: linear.linear(p, x, m, wide, counts),  # type: ignore[misc]
        )
    keys, values = (
        put(name, normal(*shape).astype(np.float16).view(np.uint16), DType.F16)
        for name, shape in (("k", (128, 8, 128, 16)), ("v", (128, 8, 16, 128)))
    )
    slots = put("slots", np.array([2047], np.int32), DType.I32)
    k, v = put("k_row", normal(1, 1024)), put("v_row", normal(1, 1024))
    add("rope_write 32/8 x 128", lambda p: rope_write.rope_write(
        p, x, k, v, positions, slots, table, keys, values, counts, num_heads=32, head_dim=128,
        style="normal",
    ))  # fmt: skip
    blocks = put("tables", np.arange(128, dtype=np.int32)[None], DType.I32)
    rows = put("rows", np.zeros(1, np.int32), DType.I32)
    attended = put("attended", np.zeros((1, 4096), np.float32))
    add("attention 2048 keys, 32/8 x 128", lambda p: attention.attention(
        p, x, keys, values, blocks, rows, positions, attended, counts, num_heads=32, scale=128**-0.5
    ))  # fmt: skip
    return found


# Decode.


def decode(device: str) -> dict[str, Any]:
    """Batch-1 decode of an 8B-shaped model: tokens per second, and its share of copy bandwidth.

    The targets of the first step: 70 % in F16, 50 % in Q4_0. Bytes are those of the weights that
    a step reads and of the keys and values of its context.
    """
    measured = bandwidth(device)
    per_s = measured["copy_bytes_per_s"]
    targets = {DType.F16: 0.7, DType.Q4_0: 0.5, DType.Q8_0: None, DType.Q4_K: None}
    rows = []
    for dtype, target in targets.items():
        try:
            row = _decode_one(device, dtype, per_s)
        except Exception as error:  # the next type must still be measured
            rows.append({"dtype": dtype.name, "problem": f"{type(error).__name__}: {error}"[:400]})
            continue
        row["target_share"] = target
        row["reached"] = None if target is None else row["steps"][0]["share"] >= target
        rows.append(row)
    return {
        "ok": all("problem" not in row for row in rows),
        "copy_bytes_per_s": per_s,
        "read_bytes_per_s": measured["read_bytes_per_s"],
        "models": rows,
    }


def _decode_one(device: str, dtype: DType, bytes_per_s: float) -> dict[str, Any]:
    from hypocenter.device.marks import mark_memory
    from hypocenter.model.layers.decoder import Decoder
    from hypocenter.model.layers.step_buffers import Cache, KVPages, StepInputs

    backend: Any = devices.backend_of(device)
    # Made with the first mark, and to outlive what this one allocates.
    mark_memory(device)
    before = set(backend.addresses)
    context, block_size = 4096, 16
    facts = llama_8b(context)
    weights, weight_bytes = large_weights(facts, dtype, context, device)
    num_blocks = context // block_size
    inputs = StepInputs.allocate(1, 1, num_blocks, device=device)
    pages = KVPages.allocate(facts, num_blocks, block_size, DType.F16, device=device)
    plan = Decoder(facts, weights, inputs, Cache(pages), 1).plan(1, 1)
    copies.to_device(inputs.block_tables, np.arange(num_blocks, dtype=np.int32)[None])
    copies.to_device(inputs.counts, np.array([1, 1], np.int32))
    graph, walk = backend.capture(plan.run), partial(_walk, plan.launches)
    steps = []
    for position in (127, 2047):
        for tensor, value in (
            (inputs.token_ids, 17), (inputs.positions, position), (inputs.slots, position),
        ):  # fmt: skip
            copies.to_device(tensor, np.array([value], np.int32))
        seconds = statistics.median(event_seconds(graph, 20))
        num_bytes = weight_bytes + (position + 1) * facts.kv_bytes_per_token(DType.F16)
        steps.append(
            {
                "position": position,
                "ms_per_token": seconds * 1e3,
                "tokens_per_s": 1 / seconds,
                "bytes_per_token": num_bytes,
                "share": num_bytes / seconds / bytes_per_s,
            }
        )
    finite = bool(np.isfinite(copies.to_host(plan.result)).all())
    result = {
        "dtype": dtype.name,
        "num_launches": len(plan.launches),
        "logits_finite": finite,
        "steps": steps,
        "without_graph_ms": statistics.median(event_seconds(walk, 5)) * 1e3,
        "slowest_kernels_us": _by_kernel(plan),
        "guarded": _decode_guarded(plan, steps[-1]["ms_per_token"]),
    }
    if not finite:
        result["problem"] = "logits are not finite"
    # Room for the next type: everything above is released with its last name.
    del plan, graph, walk, weights, inputs, pages
    gc.collect()
    for address in set(backend.addresses) - before:
        backend.free(address)
    return result


def _walk(launches: Sequence[launch.Launch]) -> None:
    for prepared in launches:
        prepared.run()


def _by_kernel(plan: Any) -> dict[str, float]:
    """Device time of one step by kernel, each launch timed alone, and so with its own start-up."""
    total: dict[str, float] = {}
    for prepared in plan.launches:
        seconds = min(event_seconds(prepared.run, 2))
        total[prepared.kernel] = total.get(prepared.kernel, 0.0) + seconds * 1e6
    return {name: round(us, 1) for name, us in sorted(total.items(), key=lambda item: -item[1])}


def _decode_guarded(plan: Any, plain_ms: float) -> dict[str, Any] | str:
    """The same step guarded, with its one look at the slots; the target: at most 3 x slower."""
    try:
        plan.set_mode("guarded")
        ms = statistics.median(event_seconds(plan.run, 20)) * 1e3  # a graph after the first two
    except HypoError as error:
        return f"not present: {error}"
    finally:
        plan.set_mode("off")
    return {"ms_per_token": ms, "ratio_to_graph": ms / plain_ms}


# Clocks.


def event_seconds(run: Callable[[], Any], num_runs: int) -> list[float]:
    """Device seconds of each run, after two that do not count."""
    import torch

    times = []
    for index in range(num_runs + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    return times


def _graph_seconds(backend: Any, run: Callable[[], None], num_launches: int = 20) -> float:
    """Device seconds per launch, launched from a graph so that the host plays no part."""

    def repeat() -> None:
        for _ in range(num_launches):
            run()

    graph = backend.capture(repeat)
    return statistics.median(event_seconds(graph, 10)) / num_launches
