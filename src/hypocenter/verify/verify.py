"""`verify`: the stages in turn, each with its share of the time that is left.

Loads a model once on the device and once on the CPU; says nothing of what it did not look at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypocenter.base.errors import BadSetting
from hypocenter.device import devices
from hypocenter.device.choice import with_device
from hypocenter.device.cpu.target import instruction_set
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.settings.config import EngineConfig, OnProgress
from hypocenter.verify.ahead_stage import AheadStage
from hypocenter.verify.kernel_stage import KernelStage
from hypocenter.verify.logits_stage import LogitsStage
from hypocenter.verify.machine.memory_stage import MemoryStage
from hypocenter.verify.outcome import Stage, StageVerdict, Uncovered, Verification
from hypocenter.verify.repeats_stage import RepeatsStage
from hypocenter.verify.sampling_stage import SamplingStage


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is looked."""

    name: str
    seconds: float


EFFORTS = {
    "quick": Effort("quick", 20.0),
    "default": Effort("default", 120.0),
    "long": Effort("long", 900.0),
}
#: How the time is shared. What a stage leaves the next ones have, and what it takes beyond its
#: share they lack. Those whose single steps take longest come last.
SHARES = {
    "kernels": 0.4,
    "sampling": 0.08,
    "repeats": 0.12,
    "logits": 0.25,
    "ahead": 0.05,
    "memory": 0.1,
}
#: Tokens of the KV cache: a context's worth, so that a large model's cache leaves room.
_MAX_CONTEXT = 1024


def verify(
    path: str,
    config: EngineConfig,
    effort: Effort,
    *,
    with_memory: bool = False,
    progress: OnProgress | None = None,
) -> Verification:
    """Look whether the device computes the model at `path` rightly.

    The time begins when the model is loaded and its kernels are compiled. Raises as `load_runner`
    does, and BadSetting for a draft model.
    """
    if config.draft_model is not None:
        limit = "one model is verified at a time; leave it out, and verify that one by itself"
        raise BadSetting("draft_model", config.draft_model, limit)
    with open_gguf(Path(path)) as file:
        config, _ = with_device(file.path, config)
        config = with_short_context(file, config, _MAX_CONTEXT)
        runner = load_runner(file, config, progress)
        on_cpu = None
        if config.device != "cpu":
            on_cpu = load_runner(file, replace(config, device="cpu"), progress)
        try:
            return _stages(file, runner, on_cpu, effort, with_memory, progress)
        finally:
            runner.release()


def with_short_context(file: GGUFFile, config: EngineConfig, most: int) -> EngineConfig:
    """The configuration with a context of `most` tokens, where none was asked for and the model
    takes so many. Raises as `read_architecture` does."""
    if config.context_length is not None:
        return config
    most = min(read_architecture(file, config.pooling).context_length, most)
    tokens = config.kv_tokens or 8 * most
    return replace(config, context_length=most, kv_tokens=tokens)


def _stages(
    file: GGUFFile,
    runner: Runner,
    on_cpu: Runner | None,
    effort: Effort,
    with_memory: bool,
    progress: OnProgress | None,
) -> Verification:
    started = time.perf_counter()
    device = runner.config.device

    wanted = [name for name in SHARES if name != "memory" or with_memory]

    def over_at(name: str) -> Callable[[], bool]:
        now = time.perf_counter()
        if progress:
            progress(f"verifying {name}", min((now - started) / effort.seconds, 1.0))
        seconds = stage_seconds(name, wanted, started + effort.seconds - now)
        return lambda: time.perf_counter() >= now + seconds

    kernels = KernelStage(file, device, list(runner.plans_of_all_forms()))
    stages = [kernels.run(over_at("kernels"))]
    sampling = SamplingStage(device, runner.vocab_size, runner.max_batch_requests)
    stages.append(sampling.run(over_at("sampling")))
    stages.append(RepeatsStage(runner, kernels.units).run(over_at("repeats")))
    stages.append(LogitsStage(runner, on_cpu).run(over_at("logits")))
    stages.append(AheadStage(runner).run(over_at("ahead")))
    if with_memory:
        stages.append(MemoryStage(device).run(over_at("memory")))
    else:
        left = (Uncovered("free memory", "ask for it by --memory"),)
        asks = "does free memory hold what is written to it?"
        stages.append(Stage("memory", asks, StageVerdict.NOT_RUN, uncovered=left))
    return Verification(
        model=file.path.name,
        device=device,
        hardware=hardware(device),
        effort=effort.name,
        budget_seconds=effort.seconds,
        stages=tuple(stages),
        seconds=time.perf_counter() - started,
    )


def stage_seconds(name: str, wanted: Sequence[str], left_seconds: float) -> float:
    """Seconds of what is left for a stage, which shares it with those of `wanted` behind it."""
    behind = wanted[wanted.index(name) :]
    return max(left_seconds, 0.0) * SHARES[name] / sum(SHARES[other] for other in behind)


def hardware(device: str) -> str:
    """What the device is, for people."""
    if device == "cpu":
        return f"this machine's processor, {instruction_set()}"
    limits = devices.backend_of(device).limits
    name = limits.product if limits is not None else device
    if device.startswith("sim:"):
        return f"a simulated {name}: Triton's operations on this processor, no machine code"
    if device.startswith("emu:"):
        return f"an emulated {name}: AMD's machine code on this processor, not hardware"
    return str(name)
