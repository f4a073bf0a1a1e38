"""`verify`: the stages in turn, each with its share of the time that is left.

Loads a model once on the device and once on the CPU; says nothing of what it did not look at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hypocenter.base.errors import BadSetting
from hypocenter.device import devices
from hypocenter.device.choice import with_device
from hypocenter.device.cpu.target import instruction_set
from hypocenter.engine.runner import Runner, load_runner
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.settings.config import EngineConfig, OnProgress, is_simulated
from hypocenter.verify import ahead_stage, logits_stage, repeats_stage, sampling_stage
from hypocenter.verify.ahead_stage import AheadStage
from hypocenter.verify.clock import StageClock
from hypocenter.verify.kernel_stage import NOT_COMPILED, KernelStage
from hypocenter.verify.logits_stage import LogitsStage
from hypocenter.verify.machine import memory_stage
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
#: The same where a processor stands for a GPU: steps of a whole model take long, and need room.
SHARES_SIMULATED = {**SHARES, "kernels": 0.3, "sampling": 0.05, "repeats": 0.1, "ahead": 0.3}
#: Times the time, until when kernels are compiled that no cache has: those of the CPU engine, and
#: those of the device.
COMPILING = {"cpu": 1.0, "device": 3.0}
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

    The time begins here. What takes long to load or to compile leaves half of it all the same.
    Raises as `load_runner` does, and BadSetting for a draft model.
    """
    started = time.perf_counter()
    if config.draft_model is not None:
        limit = "one model is verified at a time; leave it out, and verify that one by itself"
        raise BadSetting("draft_model", config.draft_model, limit)
    with open_gguf(Path(path)) as file:
        config, _ = with_device(file.path, config)
        config = with_short_context(file, config, _MAX_CONTEXT)
        runner = load_runner(file, config, progress, compiles=False)
        on_cpu = None
        if config.device != "cpu":
            of_cpu = replace(config, device="cpu")
            on_cpu = load_runner(file, of_cpu, progress, compiles=False)
        try:
            ready = _compile(runner, on_cpu, effort.seconds, progress)
            prepared = time.perf_counter() - started
            end = max(started + effort.seconds, started + prepared + effort.seconds / 2)
            stages = _stages(file, ready, end, with_memory, progress)
        finally:
            runner.release()
        return Verification(
            model=file.path.name,
            device=config.device,
            hardware=hardware(config.device),
            effort=effort.name,
            budget_seconds=effort.seconds,
            stages=tuple(stages),
            seconds=time.perf_counter() - started,
            preparing_seconds=prepared,
        )


@dataclass(frozen=True, slots=True)
class _Ready:
    """Runners of the device and of the CPU, if that is another, and whether all is compiled that
    their steps launch."""

    runner: Runner
    on_cpu: Runner | None
    is_whole: bool
    has_cpu: bool


def _compile(
    runner: Runner, on_cpu: Runner | None, seconds: float, progress: OnProgress | None
) -> _Ready:
    """Compile for both, as far as that goes in a multiple of `seconds`."""
    now = time.perf_counter()

    def until(part: str) -> Callable[[], bool]:
        stop = now + seconds * COMPILING[part]
        return lambda: time.perf_counter() >= stop

    has_cpu = on_cpu is None or on_cpu.compile(progress, until("cpu"))
    return _Ready(runner, on_cpu, runner.compile(progress, until("device")), has_cpu)


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
    ready: _Ready,
    end: float,
    with_memory: bool,
    progress: OnProgress | None,
) -> list[Stage]:
    """Run the stages until the time `end`."""
    started, runner = time.perf_counter(), ready.runner
    device = runner.config.device
    wanted = [name for name in SHARES if ready.is_whole or name in ("kernels", "memory")]
    wanted = [name for name in wanted if name != "memory" or with_memory]

    def over_at(name: str, first_takes: float = 0.0) -> Callable[[], bool]:
        now = time.perf_counter()
        if progress:
            progress(f"verifying {name}", min((now - started) / (end - started), 1.0))
        shares = SHARES_SIMULATED if is_simulated(device) else SHARES
        seconds = stage_seconds(name, wanted, end - now, shares)
        return StageClock(seconds, first_takes=first_takes)

    plans = list(runner.plans_of_all_forms())
    kernels = KernelStage(file, device, plans, compiles=ready.is_whole)
    stages = [kernels.run(over_at("kernels"))]
    if ready.is_whole:
        sampling = SamplingStage(device, runner.vocab_size, runner.max_batch_requests)
        stages.append(sampling.run(over_at("sampling")))
        stages.append(RepeatsStage(runner, kernels.units).run(over_at("repeats")))
        on_cpu = ready.on_cpu if ready.has_cpu else None
        why = NOT_COMPILED if ready.on_cpu is not None else "the device is the CPU itself"
        step = kernels.launch_seconds * len(runner.plan_of_answers(1).launches)
        stages.append(LogitsStage(runner, on_cpu, why).run(over_at("logits", step)))
        stages.append(AheadStage(runner).run(over_at("ahead", step)))
    else:
        left = (sampling_stage, repeats_stage, logits_stage, ahead_stage)
        stages += [_not_run(of.NAME, of.ASKS, "all of it", NOT_COMPILED) for of in left]
    if with_memory:
        stages.append(MemoryStage(device).run(over_at("memory")))
    else:
        why, asks = "ask for it by --memory", memory_stage.ASKS
        stages.append(_not_run("memory", asks, "free memory", why))
    return stages


def _not_run(name: str, asks: str, what: str, why: str) -> Stage:
    return Stage(name, asks, StageVerdict.NOT_RUN, uncovered=(Uncovered(what, why),))


def stage_seconds(
    name: str,
    wanted: Sequence[str],
    left_seconds: float,
    shares: Mapping[str, float] = SHARES,
) -> float:
    """Seconds of what is left for a stage, which shares it with those of `wanted` behind it."""
    behind = wanted[wanted.index(name) :]
    return max(left_seconds, 0.0) * shares[name] / sum(shares[other] for other in behind)


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
