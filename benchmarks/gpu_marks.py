"""What the recorder costs a decode step on a real GPU: its marks there, its words on the host."""

from __future__ import annotations

import functools
import statistics
from dataclasses import replace
from typing import Any, cast

import numpy as np
import recorder_cost
from gpu_model import large_weights, llama_8b
from gpu_speed import event_seconds
from pretended.fake_runner import FakeTokenizer

from hypocenter.base.tensor import DType
from hypocenter.device import copies, devices, launch
from hypocenter.device.plan import Plan
from hypocenter.engine.engine import Engine
from hypocenter.engine.runner import Runner
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.facts.layer_shapes import LayerShape
from hypocenter.model.layers.decoder import Decoder
from hypocenter.model.layers.step_buffers import Cache, KVPages, StepInputs
from hypocenter.model.tensors.table import Weights
from hypocenter.record import recorder, ring
from hypocenter.record.not_recording import UNREAD_HEADER
from hypocenter.settings.config import EngineConfig

CONTEXT, BLOCK_SIZE = 2048, 16
MAX_SHARE = 0.01


def marks(device: str) -> dict[str, Any]:
    """Device time of a decode step of a 1.1B model in Q4_0 with and without marks, by turns, and
    wall-clock time of whole steps of the engine with and without the rest of the recorder.

    The former are graphs of the same launches. The target: at most 1 % of the step each.
    """
    name = devices.open_device(device)
    opened = recorder.current()
    if not isinstance(opened, recorder.Recorder):
        return {"ok": False, "problem": "nothing is recorded; is HYPO_RECORD set?"}
    facts, weights = _model(name)
    plan = _plan(facts, weights, name)
    if not plan.marks:
        return {"ok": False, "problem": "no marks: this GPU cannot write to the record"}
    backend: Any = devices.backend_of(name)
    found = []
    for _ in range(4):  # plain, captured, replayed, replayed
        plan.run()
        backend.synchronise()
        found.append(ring.read_run(opened.folder).progress)
    is_right = all(one.completed == one.submitted is not None for one in found)
    plan.release()
    header, word = UNREAD_HEADER
    graphs = {
        "with": backend.capture(functools.partial(launch.walk, plan._numbered, header, word)),
        "without": backend.capture(
            functools.partial(launch.walk, tuple(enumerate(plan.launches)), header, word)
        ),
    }
    seconds: dict[str, list[float]] = {way: [] for way in graphs}
    for _ in range(5):
        for way, graph in graphs.items():
            seconds[way] += event_seconds(graph, 20)
    with_marks, without = (statistics.median(seconds[way]) for way in ("with", "without"))
    share = (with_marks - without) / without
    words = _words(facts, weights, name, opened)
    return {
        "ok": share <= MAX_SHARE and is_right and words["share"] <= MAX_SHARE,
        "num_launches": len(plan.launches),
        "num_marks": len(plan.marks),
        "step_us": without * 1e6,
        "us_per_mark": (with_marks - without) / len(plan.marks) * 1e6,
        "share_of_step": share,
        "marks_are_right": is_right,
        "progress": [str(one) for one in found],
        "host": words,
    }


def _words(
    facts: Architecture, weights: Weights, device: str, opened: recorder.Recorder
) -> dict[str, Any]:
    """What else the recorder does in a step, with graphs; neighbouring turns are compared."""
    config = EngineConfig(device=device, context_length=CONTEXT, max_batch_tokens=64)
    engine = Engine(Runner(facts, weights, config, CONTEXT), cast(Any, FakeTokenizer()))
    times = recorder_cost.by_turns(engine, opened, 400)
    pairs = zip(times["on"], times["off"], strict=True)
    cost = statistics.median(on - off for on, off in pairs)
    step = statistics.median(times["off"])
    return {"step_us": step * 1e6, "cost_us": cost * 1e6, "share": cost / step}


def _model(device: str) -> tuple[Architecture, Weights]:
    """The shape of TinyLlama 1.1B."""
    facts = replace(
        llama_8b(CONTEXT), layers=(LayerShape(4, 64, 5632),) * 22, width=2048, vocab_size=32000,
        attn_scale=64**-0.5,
    )  # fmt: skip
    turns = replace(facts.rope, dim=64)
    facts = replace(facts, rope=turns, local_rope=turns)
    return facts, large_weights(facts, DType.Q4_0, CONTEXT, device)[0]


def _plan(facts: Architecture, weights: Weights, device: str) -> Plan:
    """A step of one token behind 127 others."""
    num_blocks = CONTEXT // BLOCK_SIZE
    inputs = StepInputs.allocate(1, 1, num_blocks, device=device)
    pages = KVPages.allocate(facts, num_blocks, BLOCK_SIZE, DType.F16, device=device)
    plan = Decoder(facts, weights, inputs, Cache(pages), 1).plan(1, 1)
    copies.to_device(inputs.block_tables, np.arange(num_blocks, dtype=np.int32)[None])
    copies.to_device(inputs.counts, np.array([1, 1], np.int32))
    for tensor, value in (
        (inputs.token_ids, 17), (inputs.positions, 127), (inputs.slots, 127),
    ):  # fmt: skip
        copies.to_device(tensor, np.array([value], np.int32))
    return plan
