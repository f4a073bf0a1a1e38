"""How long a model's context is, and how much of a GPU its KV cache takes.

Loads and allocates nothing.
"""

from __future__ import annotations

from hypocenter.base.errors import BadSetting
from hypocenter.device.backend import Room
from hypocenter.model.facts.architecture import Architecture
from hypocenter.model.gguf.file import GGUFFile
from hypocenter.model.tensors import footprint
from hypocenter.settings.config import DEFAULT_CONTEXT, KV_DTYPES, EngineConfig

#: Tokens that the KV cache holds at most where nobody says, if so many requests cannot fill it.
#: Beyond that the lists of blocks on the host would cost more than kept prompts save.
_MOST_KEPT_TOKENS = 1 << 20


def context_length_of(facts: Architecture, config: EngineConfig) -> int:
    """The context that a model runs with. Raises BadSetting above the trained one."""
    wanted = config.context_length
    if wanted is None:
        return min(facts.context_length, DEFAULT_CONTEXT)
    if wanted > facts.context_length:
        limit = f"the model was trained for {facts.context_length}; take at most that"
        raise BadSetting("context_length", wanted, limit)
    return wanted


def kv_room(file: GGUFFile, facts: Architecture, config: EngineConfig, room: Room) -> int:
    """Bytes for the KV cache on a GPU with `room`, once the model's weights are there.

    What a step needs is left, and so much that `gpu_memory_fraction` of all is in use.
    """
    needed = footprint.needed_bytes(file, facts, config, context_length_of(facts, config))
    of_steps = sum(needed.values()) - needed["weights"] - needed["KV cache"]
    reserved = int(room.limit_bytes * (1 - config.gpu_memory_fraction))
    return max(room.available_bytes - reserved - of_steps, 0)


def kv_tokens_in(num_bytes: int, facts: Architecture, config: EngineConfig) -> int:
    """Tokens of a KV cache of so many bytes, where nobody says how many it holds.

    It is at least one context, and for a single request no more than that.
    """
    context_length = context_length_of(facts, config)
    per_token = facts.kv_bytes_per_token(KV_DTYPES[config.kv_dtype])
    if config.max_batch_requests == 1 or not per_token:
        return context_length
    most = max(config.max_batch_requests * context_length, _MOST_KEPT_TOKENS)
    return max(min(num_bytes // per_token, most), context_length)
