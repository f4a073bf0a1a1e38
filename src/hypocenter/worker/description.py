"""What a worker tells of its model, and of the end of a request."""

from __future__ import annotations

import math
from pathlib import Path

from hypocenter.engine.llm import LLM
from hypocenter.engine.request import Request
from hypocenter.model.gguf.file import open_gguf
from hypocenter.model.gguf.file_types import quantisation_of
from hypocenter.model.tensors.footprint import host_weight_bytes
from hypocenter.settings.config import EngineConfig
from hypocenter.wire.messages import Ending, ServedModel


def facts_of(llm: LLM, path: Path, config: EngineConfig) -> ServedModel:
    """Facts of a model that is loaded, and of the file that it came from."""
    engine, tokenizer, template = llm.engine, llm.tokenizer, llm.chat_template
    runner = engine.runner
    with open_gguf(path, config.override_kv) as file:
        name = file.metadata.get("general.name")
        quantisation = quantisation_of(file)
        on_host = host_weight_bytes(file, runner.arch, runner.config)
        num_parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())

    def text(token_id: int | None) -> str:
        return "" if token_id is None else tokenizer.piece(token_id).decode("utf-8", "replace")

    def id_or_none(token_id: int | None) -> int:
        return -1 if token_id is None else token_id

    return ServedModel(
        name=name if isinstance(name, str) else path.stem,
        architecture=runner.arch.name,
        quantisation=quantisation,
        num_parameters=num_parameters,
        file_bytes=path.stat().st_size,
        context_length=runner.context_length,
        trained_length=runner.arch.context_length,
        vocab_size=runner.vocab_size,
        bos_id=id_or_none(tokenizer.bos_id),
        eos_id=id_or_none(tokenizer.eos_id),
        bos_text=text(tokenizer.bos_id),
        eos_text=text(tokenizer.eos_id),
        chat_template="" if template is None else template.source,
        device=runner.config.device,
        instruction_set=engine.route().instruction_set,
        max_requests=config.max_batch_requests,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        host_weight_bytes=on_host,
        step_tokens=runner.max_batch_tokens,
        longest_token_bytes=max(len(tokenizer.piece(i)) for i in range(tokenizer.vocab_size)),
        pooling="" if llm.pooling is None else llm.pooling.kind,
        embedding_size=0 if llm.pooling is None else runner.text_head.num_columns,
    )


def ending_of(request: Request) -> Ending:
    """How a request ended that has no error."""
    timings, drafter = request.timings(), request.drafter
    return Ending(
        reason=request.finish_reason or "",
        num_cached_tokens=timings.num_cached_tokens,
        prompt_seconds=timings.prompt_seconds,
        generation_seconds=timings.generation_seconds,
        num_preemptions=request.num_preemptions,
        stop_string=request.stop_string,
        num_drafts=drafter.num_drafts if drafter else 0,
        num_drafted=drafter.num_drafted if drafter else 0,
        accepted_at=tuple(drafter.accepted_at) if drafter else (),
    )
