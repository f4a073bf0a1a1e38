"""Loads a draft model beside the model that it writes ahead of, once both have one vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypocenter.base.errors import BadSetting
from hypocenter.engine.drafting.draft_model import DraftModel
from hypocenter.engine.drafting.drafter import costs_on
from hypocenter.engine.drafting.head_model import HeadModel
from hypocenter.engine.drafting.model_drafter import DraftRecord
from hypocenter.engine.runner import Runner, Seat, load_runner
from hypocenter.model.facts.architecture import read_architecture
from hypocenter.model.facts.nextn import head_of
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.gguf.identity import require_model
from hypocenter.model.placement import draft_config, weight_bytes
from hypocenter.model.tensors.adapters import open_adapters, with_adapters
from hypocenter.model.tensors.weights import load_head
from hypocenter.settings.config import EngineConfig, OnProgress

#: Files of one family pad their vocabularies to unlike sizes; so many more tokens are padding.
#: llama.cpp has the same bound (SPEC_VOCAB_MAX_SIZE_DIFFERENCE in common/speculative.cpp).
_MAX_PADDING = 128
_TOKENS = "tokenizer.ggml.tokens"


def load_draft_model(
    file: GGUFFile, runner: Runner, config: EngineConfig, progress: OnProgress | None = None
) -> DraftModel | None:
    """The draft model that `config` names, or the head of the file that drafts, for the model of
    `file`, which `runner` has loaded.

    Raises BadSetting for one of another vocabulary or whose layers carry states, and what
    `load_runner` raises.
    """
    if config.spec == "mtp":
        return _load_head(file, runner, config, progress)
    if config.draft_model is None:
        return None
    with open_gguf(Path(config.draft_model)) as own:
        require_model(own)
        arch = read_architecture(own)
        _require_same_tokens(config.draft_model, file, own)
        _require_as_many(config.draft_model, runner.vocab_size, arch.vocab_size)
        if arch.recurrence is not None:
            limit = "layers of this model carry states, which cannot be taken back; take another"
            raise BadSetting("draft_model", config.draft_model, limit)
        if arch.pooling is not None or arch.family.sees_all:
            limit = "this model makes vectors and writes no text; take another"
            raise BadSetting("draft_model", config.draft_model, limit)
        kv_tokens = runner.num_blocks * runner.block_size
        small = draft_config(arch, runner.config, runner.context_length, kv_tokens)
        drafting = load_runner(own, small, progress, seat=Seat(is_draft=True))
        cost = weight_bytes(own) / weight_bytes(file)
    record = DraftRecord(costs_on(runner.config.device), cost, is_chained=drafting.runs_ahead)
    placed = runner.token_ids, runner.drawn_rows
    model = DraftModel(drafting, record, runner.vocab_size, config.launch_mode, *placed)
    model.compile()
    runner.count_compiled()
    return model


def _load_head(
    file: GGUFFile, runner: Runner, config: EngineConfig, progress: OnProgress | None
) -> HeadModel:
    arch, device = head_of(file, runner.arch), runner.config.device
    adapters = open_adapters(config.lora, file, arch)
    joins_gates = adapters is None or not adapters.reads_feed_forwards
    weights = load_head(
        file, arch, runner.weights, progress, device=device, joins_gates=joins_gates
    )
    weights = with_adapters(weights, adapters, file, arch, device)
    kv_tokens = runner.num_blocks * runner.block_size
    small = draft_config(arch, runner.config, runner.context_length, kv_tokens)
    seat = Seat(is_draft=True, hidden=runner.hidden, adapters=runner.adapters)
    head = Runner(arch, weights, small, runner.context_length, seat)
    head.compile(progress)
    own = _bytes_of(file, f"blk.{arch.first_layer}.")
    output = _bytes_of(file, "output.weight") or _bytes_of(file, "token_embd.weight")
    cost = (own + output) / (weight_bytes(file) - own)
    record = DraftRecord(costs_on(device), cost, is_chained=head.runs_ahead)
    placed = runner.token_ids, runner.drawn_rows
    model = HeadModel(head, record, runner.vocab_size, config.launch_mode, *placed)
    model.compile()
    runner.count_compiled()
    return model


def _bytes_of(file: GGUFFile, prefix: str) -> int:
    """What the tensors whose names begin so take."""
    return sum(x.num_bytes for name, x in file.tensors.items() if name.startswith(prefix))


def _require_as_many(path: str, num_tokens: int, num_own: int) -> None:
    if abs(num_tokens - num_own) > _MAX_PADDING:
        limit = f"it has {num_own} tokens, and the model {num_tokens}; take one of its vocabulary"
        raise BadSetting("draft_model", path, limit)


def _require_same_tokens(path: str, file: GGUFFile, own: GGUFFile) -> None:
    """Raises BadSetting for the first token that is another one in the two files."""
    theirs, mine = _tokens_of(file), _tokens_of(own)
    for number, (their, my) in enumerate(zip(theirs, mine, strict=False)):
        if their != my:
            limit = (
                f"token {number} is {my!r} there, and {their!r} in the model; take one of its "
                "vocabulary"
            )
            raise BadSetting("draft_model", path, limit)
    if bool(theirs) != bool(mine):
        limit = "one of the two files has no vocabulary; take one of the model's"
        raise BadSetting("draft_model", path, limit)


def _tokens_of(file: GGUFFile) -> Sequence[object]:
    tokens = file.metadata.get(_TOKENS)
    return tokens if isinstance(tokens, Sequence) and not isinstance(tokens, str) else ()
