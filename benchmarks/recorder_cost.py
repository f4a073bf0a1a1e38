"""What the recorder costs a decode step on the CPU, on and off by turns in one run.

Two figures for each model: the cost alone, from steps whose launches do nothing, as a share of the
step's real time; and the difference between real steps with and without, which the noise of the
machine hides unless it is large. The targets: at most 1 % of a step of a 1.1B model in Q4_0, and
100 ns per launch. Writes benchmarks/results/recorder_cost.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/support")]

from ops.kernel_launch import random_rows  # noqa: E402
from pretended.fake_runner import FakeTokenizer  # noqa: E402

from hypocenter import LLM  # noqa: E402
from hypocenter.base.tensor import DType, Tensor  # noqa: E402
from hypocenter.device import copies, devices, launch, memory  # noqa: E402
from hypocenter.device.cpu.native import NativeLaunches  # noqa: E402
from hypocenter.device.plan import Plan  # noqa: E402
from hypocenter.engine.engine import Engine  # noqa: E402
from hypocenter.engine.runner import Runner  # noqa: E402
from hypocenter.kernels.attention import rope  # noqa: E402
from hypocenter.kernels.weights import packing  # noqa: E402
from hypocenter.model.facts.architecture import Architecture, Rope  # noqa: E402
from hypocenter.model.facts.families import FAMILIES  # noqa: E402
from hypocenter.model.facts.layer_shapes import LayerShape  # noqa: E402
from hypocenter.model.tensors.rope_tables import RopeTables  # noqa: E402
from hypocenter.model.tensors.table import FeedForward, LayerWeights, Weights  # noqa: E402
from hypocenter.record import recorder  # noqa: E402
from hypocenter.record.not_recording import NotRecording  # noqa: E402
from hypocenter.record.recorder import Recorder  # noqa: E402
from hypocenter.settings.config import EngineConfig, SamplingParams  # noqa: E402

MAX_SHARE, MAX_NS_PER_LAUNCH = 0.01, 100.0
CONTEXT = 512
#: Steps of one kind in a row.
TURN = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=60, help="real steps of each kind")
    parser.add_argument("--layers", type=int, default=22, help="layers of the 1.1B shape")
    options = parser.parse_args()
    devices.open_device("cpu")
    opened = recorder.current()
    assert isinstance(opened, recorder.Recorder), "HYPO_RECORD=0 leaves nothing to measure"
    per_launch = _ns_per_launch(opened)
    rows = []
    for name, engine in _engines(options.layers):
        rows.append(_measure(name, engine, opened, options.steps))
        print(_line(rows[-1]), flush=True)
    gated = rows[0]
    ok = gated["share"] <= MAX_SHARE and per_launch <= MAX_NS_PER_LAUNCH
    print(f"place word: {per_launch:.0f} ns per launch (target {MAX_NS_PER_LAUNCH:.0f})")
    print(f"both targets, with at most {MAX_SHARE:.0%} of a step of the 1.1B shape: {_word(ok)}")
    report = {
        "ok": ok, "ns_per_launch": per_launch, "models": rows, "machine": platform.machine(),
        "python": platform.python_version(), "targets": [MAX_SHARE, MAX_NS_PER_LAUNCH],
    }  # fmt: skip
    path = ROOT / "benchmarks/results/recorder_cost.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if ok else 1


def _engines(num_layers: int) -> Iterator[tuple[str, Engine]]:
    facts = _tiny_llama(num_layers)
    config = EngineConfig(device="cpu", context_length=CONTEXT, max_batch_tokens=64)
    runner = Runner(facts, _weights(facts), config, CONTEXT)
    yield f"1.1B Q4_0, {num_layers} layers", Engine(runner, cast(Any, FakeTokenizer()))
    with LLM(config=replace(config, context_length=256)) as llm:
        yield "bundled model", llm.engine


def _tiny_llama(num_layers: int) -> Architecture:
    """The shape of TinyLlama 1.1B: its config.json."""
    turns = Rope(base=10000.0, dim=64)
    return Architecture(
        name="llama", family=FAMILIES["llama"], layers=(LayerShape(4, 64, 5632),) * num_layers,
        width=2048, num_heads=32, vocab_size=32000, context_length=CONTEXT, norm_eps=1e-5,
        rope=turns, local_rope=turns, attn_scale=64**-0.5, attn_softcap=0.0, final_softcap=0.0,
    )  # fmt: skip


def _weights(facts: Architecture) -> Weights:
    """Random weights, other memory for each layer; small ones, so that logits stay finite."""
    packed: dict[tuple[int, int], Any] = {}

    def matrix(name: str, num_rows: int, num_columns: int) -> Tensor:
        shape = (num_rows, num_columns)
        if shape not in packed:
            packed[shape] = packing.pack(random_rows(DType.Q4_0, *shape), DType.Q4_0, num_columns)
        own = tuple(
            part.copy() if isinstance(part, np.ndarray) else part for part in packed[shape].parts
        )
        return packing.place(name, "model", replace(packed[shape], parts=own))

    def vector(name: str, values: np.ndarray[Any, Any]) -> Tensor:
        made = memory.allocate(name, "model", DType.F32, values.shape)
        copies.to_device(made, values)
        return made

    width, ffn, kv = facts.width, facts.layers[0].ffn_width, facts.layers[0].kv_width
    ones = np.full(width, 0.01, np.float32)
    shapes = {
        "q": (width, width), "k": (kv, width), "v": (kv, width), "attn_output": (width, width),
    }  # fmt: skip
    of_dense = {"gate": (ffn, width), "up": (ffn, width), "down": (width, ffn)}
    layers = []
    for index in range(facts.num_layers):
        needed = (one.name for one in dataclasses.fields(LayerWeights) if one.default is MISSING)
        fields: dict[str, Any] = dict.fromkeys(needed)
        for name in ("attn_norm", "ffn_norm"):
            fields[name] = vector(f"blk.{index}.{name}.weight", ones)
        for name, shape in shapes.items():
            fields[name] = matrix(f"blk.{index}.{name}.weight", *shape)
        dense = {
            name: matrix(f"blk.{index}.{name}.weight", *shape) for name, shape in of_dense.items()
        }
        fields["dense"] = FeedForward(**dense, gate_up=None)
        layers.append(LayerWeights(**fields))
    cos, sin = rope.tables(CONTEXT, 64, 10000.0)
    table = vector("rope_cos", cos), vector("rope_sin", sin)
    return Weights(
        matrix("token_embd.weight", facts.vocab_size, width), tuple(layers),
        vector("output_norm.weight", ones), matrix("output.weight", facts.vocab_size, width),
        RopeTables(table, table), 0,
    )  # fmt: skip


def _measure(name: str, engine: Engine, opened: Recorder, num_steps: int) -> dict[str, Any]:
    """Seconds of a step with and without, real and with launches that do nothing."""
    real = by_turns(engine, opened, num_steps)
    plans = list(engine.runner._plans.values())
    with _doing_nothing(plans):
        bare = by_turns(engine, opened, 1000)
    cost = statistics.median(bare["on"]) - statistics.median(bare["off"])
    step = statistics.median(real["off"])
    # Of neighbours, so that what slows the machine for a while slows both.
    differences = [on - off for on, off in zip(real["on"], real["off"], strict=True)]
    return {
        "model": name,
        "num_launches": max(len(plan.launches) for plan in plans),
        "step_ms": step * 1e3,
        "cost_us": cost * 1e6,
        "share": cost / step,
        "measured_difference": statistics.median(differences) / step,
    }


def by_turns(engine: Engine, opened: Recorder, num_steps: int) -> dict[str, list[float]]:
    """Seconds of a decode step with the recorder, and without, in turns of TURN steps: their means.

    Of steps that are launched ahead each begins before the one before it ends; so neighbours cannot
    be told apart, and the first of a turn does not count. There are `num_steps` steps of each kind.
    """
    times: dict[str, list[float]] = {"on": [], "off": []}
    for _ in range(-(-num_steps // 100)):
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        request = engine.request([1, 2, 3], params)
        engine.submit(request)
        for _ in range(4):
            engine.step()
        try:
            for _ in range(min(num_steps, 100) // TURN):
                for way in ("on", "off"):
                    recorder._current = opened if way == "on" else NotRecording()
                    engine.step()
                    started = time.perf_counter()
                    for _ in range(TURN):
                        engine.step()
                    times[way].append((time.perf_counter() - started) / TURN)
        finally:
            recorder._current = opened
            engine.cancel(request)
        assert request.error is None, request.error
    return times


@contextmanager
def _doing_nothing(plans: list[Plan]) -> Iterator[None]:
    kept = [(plan, plan.launches, plan._native) for plan in plans]
    try:
        for plan in plans:
            plan.launches, plan._native = (), NativeLaunches([])
        yield
    finally:
        for plan, launches, native in kept:
            plan.launches, plan._native = launches, native


def _nothing() -> None:
    """A launch that costs nothing."""


def _ns_per_launch(opened: Recorder) -> float:
    """What noting the place adds to a launch, in a plan of 300."""
    ours = [cast(Any, type("Nothing", (), {"run": staticmethod(_nothing)}))() for _ in range(300)]
    numbered = tuple(enumerate(ours))
    word = 1 << 40

    def plain() -> None:
        for one in ours:
            one.run()

    def best(work: Callable[[], None]) -> float:
        times = []
        for _ in range(300):
            started = time.perf_counter_ns()
            work()
            times.append(time.perf_counter_ns() - started)
        return min(times) / len(ours)

    return best(lambda: launch.walk(numbered, opened.header, word)) - best(plain)


def _word(is_reached: bool) -> str:
    return "reached" if is_reached else "MISSED"


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:22} {row['num_launches']:4} launches  step {row['step_ms']:8.2f} ms  "
        f"recorder {row['cost_us']:6.1f} us = {row['share']:7.3%} of a step  "
        f"(measured difference {row['measured_difference']:+.2%})"
    )


if __name__ == "__main__":
    sys.exit(main())
