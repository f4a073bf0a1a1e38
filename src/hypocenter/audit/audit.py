"""`audit`: all gates of a model in turn, each with what was looked at and what not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hypocenter.audit.beside import Beside
from hypocenter.audit.deaths import death
from hypocenter.audit.equivalence import SIMULATED, USUAL, AuditSizes, OwnGates
from hypocenter.audit.executed import OwnRecord
from hypocenter.audit.gates import attempt
from hypocenter.audit.repeats import repeats
from hypocenter.audit.residency import ASKS as residency_asks
from hypocenter.audit.residency import residency
from hypocenter.audit.soak import ASKS as memory_asks
from hypocenter.audit.soak import soak
from hypocenter.audit.ways import Ways
from hypocenter.base.errors import BadSetting
from hypocenter.device.choice import with_device
from hypocenter.engine.llm import LLM
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.record.recorder import open_recorder
from hypocenter.settings.config import EngineConfig, OnProgress, is_simulated
from hypocenter.verify.outcome import Stage, Verification
from hypocenter.verify.rounding import distance_allowed
from hypocenter.verify.verify import hardware, with_short_context


@dataclass(frozen=True, slots=True)
class Thoroughness:
    """How many runs must agree, and rounds of how many requests a soak has."""

    name: str
    num_runs: int
    num_rounds: int
    num_together: int


SHORT = Thoroughness("default", 5, 24, 8)
LONG = Thoroughness("long", 50, 1000, 16)
#: Tokens of a context: as long as anything that is run here.
_CONTEXT = 256


def audit(
    path: str,
    config: EngineConfig,
    thoroughness: Thoroughness,
    progress: OnProgress | None = None,
) -> Verification:
    """Audit what the engine does with the model at `path`. Raises as LLM does, and UsageError where
    nothing is recorded."""
    started = time.perf_counter()
    open_recorder()
    record = OwnRecord()
    keeps_blocks = config.prefix_cache
    config, _ = with_device(Path(path), config)
    is_slow = is_simulated(config.device)
    sizes = SIMULATED if is_slow and thoroughness is SHORT else USUAL
    with open_gguf(Path(path)) as file:
        config = _small(file, _without_drafts(config), sizes)
    sizes = _fit_sizes(sizes, config)
    stages: list[Stage] = []
    with LLM(path, config, progress=progress) as llm:
        for stage in _stages(llm, path, config, sizes, thoroughness, record, keeps_blocks):
            stages.append(stage)
            if progress:
                progress(f"audited {stage.name}", min(len(stages) / _NUM_GATES, 1.0))
    return Verification(
        model=Path(path).name,
        device=config.device,
        hardware=hardware(config.device),
        effort=thoroughness.name,
        budget_seconds=0.0,
        stages=tuple(stages),
        seconds=time.perf_counter() - started,
    )


#: As many as `_stages` gives, for the progress.
_NUM_GATES = 12


def _stages(
    llm: LLM,
    path: str,
    config: EngineConfig,
    sizes: AuditSizes,
    thoroughness: Thoroughness,
    record: OwnRecord,
    keeps_blocks: bool,
) -> Iterator[Stage]:
    ways = Ways(llm, record, config.device)
    allowed = distance_allowed(ways.runner)
    own = OwnGates(ways, sizes, allowed)
    for gate in own.each():  # the first of them finds an empty cache
        yield gate.run()
    yield attempt("residency", residency_asks, lambda: residency(ways, sizes.asked, sizes.answered))
    is_short = sizes.is_simulated
    yield repeats(own, 3 if is_short else thoroughness.num_runs).run()
    beside = Beside(path, own, config, record, allowed)
    yield beside.device()
    yield beside.ranks()
    yield death(path, config, own, keeps_blocks=keeps_blocks)
    rounds = 2 if is_short else thoroughness.num_rounds
    num_together = min(thoroughness.num_together, max(sizes.most_together, 1))
    yield attempt("memory", memory_asks, lambda: soak(ways, rounds, num_together))


def _small(file: GGUFFile, config: EngineConfig, sizes: AuditSizes) -> EngineConfig:
    """The configuration with a context, a cache and a batch that hold what is run here."""
    num_requests = max(sizes.most_together, 2)
    blocks_each = 1 + -(-(sizes.asked + sizes.answered) // config.block_size)
    num_tokens = blocks_each * config.block_size * num_requests + 2 * _CONTEXT
    return replace(
        with_short_context(file, config, _CONTEXT),
        kv_tokens=num_tokens,
        max_batch_requests=num_requests,
        prefix_cache=False,
    )


def _without_drafts(config: EngineConfig) -> EngineConfig:
    """The configuration itself. Raises BadSetting where steps try tokens: no gate asks for that."""
    if config.tries_tokens:
        name = "draft_model" if config.draft_model is not None else "spec"
        limit = "an audit compares steps that try no tokens; leave it out"
        raise BadSetting(name, getattr(config, name), limit)
    return config


def _fit_sizes(sizes: AuditSizes, config: EngineConfig) -> AuditSizes:
    """The part of `sizes` that the context holds and that runs in one step. Raises BadSetting where
    not even an answer does."""
    least = sizes.asked + sizes.answered
    context, step = config.context_length or _CONTEXT, config.step_tokens
    for name, most in (("context_length", context), ("max_batch_tokens", step)):
        if most < least:
            raise BadSetting(name, most, f"an audit runs {least} tokens at once; take more")
    read = min(sizes.read, context, step)
    return replace(
        sizes,
        read=read,
        chunks=tuple(chunk for chunk in sizes.chunks if chunk < read),
        batches=tuple(number for number in sizes.batches if sizes.num_first(number) <= step),
    )
