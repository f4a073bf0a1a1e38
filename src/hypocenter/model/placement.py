"""How long a model's context is, and how much of a GPU its KV cache takes.

Loads and allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hypocenter.base.errors import BadSetting, ModelTooLarge
from hypocenter.base.wording import bytes_text
from hypocenter.device.backend import Room
from hypocenter.model.facts.architecture import Architecture, read_architecture
from hypocenter.model.facts.nextn import head_of
from hypocenter.model.gguf.file import GGUFFile, open_gguf
from hypocenter.model.layers.step_buffers import HiddenStates
from hypocenter.model.tensors import footprint
from hypocenter.settings.config import DEFAULT_CONTEXT, KV_DTYPES, EngineConfig

#: Tokens that the KV cache holds at most where nobody says, if so many requests cannot fill it.
#: Beyond that the lists of blocks on the host would cost more than kept prompts save.
_MOST_KEPT_TOKENS = 1 << 20
#: What stays free of a GPU, unless `gpu_memory_fraction` leaves less.
_FREE_SHARE = 0.1
#: What a draft model takes is reckoned larger by this part.
_DRAFT_SPARE = 16
#: Less is not proposed: bits of a weight, and tokens of a context.
_LEAST_BITS, _LEAST_CONTEXT = 2.0, 256


def context_length_of(arch: Architecture, config: EngineConfig) -> int:
    """The context that a model runs with. Raises BadSetting above the longest one."""
    wanted = config.context_length
    if wanted is None:
        return min(arch.context_length, DEFAULT_CONTEXT)
    if wanted > arch.context_length:
        limit = f"{arch.length_text}; take at most that"
        raise BadSetting("context_length", wanted, limit)
    return wanted


def with_whole_texts(arch: Architecture, config: EngineConfig) -> EngineConfig:
    """The configuration with steps that have room for a whole text, where a token sees those behind
    it. Raises BadSetting for smaller ones."""
    context_length = context_length_of(arch, config)
    if not arch.family.sees_all or config.step_tokens >= context_length:
        return config
    if config.max_batch_tokens is not None:
        limit = f"a text of up to {context_length} tokens is read in one step; take at least that"
        raise BadSetting("max_batch_tokens", config.max_batch_tokens, limit)
    return replace(config, max_batch_tokens=context_length)


def kv_room(
    file: GGUFFile, arch: Architecture, config: EngineConfig, room: Room, num_workers: int = 1
) -> int:
    """Bytes for the KV cache on a GPU with `room`, once the model's weights are there.

    What a step of each of `num_workers` needs is left, and so much that `gpu_memory_fraction` of
    all is in use by this model. What others use is theirs.
    """
    needed = footprint.needed_bytes(file, arch, config, context_length_of(arch, config))
    of_steps = sum(needed.values()) - needed["weights"] - needed["KV cache"]
    own = min(needed["weights"], room.limit_bytes - room.available_bytes)
    draft = draft_needs(file, arch, config)
    left = _usable_bytes(config, room, own) - (of_steps + draft.fixed_bytes) * num_workers
    return int(max(left, 0) * draft.share_left(arch, config, num_workers))


def _usable_bytes(config: EngineConfig, room: Room, own_bytes: int) -> int:
    """What a model may still take of a GPU with `room` that has `own_bytes` of it already.

    A tenth of the GPU stays free where others have their part of it: contexts and buffers grow.
    """
    most = int(room.limit_bytes * config.gpu_memory_fraction)
    return min(most - own_bytes, room.available_bytes - reserved_bytes(config, room))


def reserved_bytes(config: EngineConfig, room: Room) -> int:
    """What the KV cache leaves of a GPU with `room`, besides what steps take."""
    return int(room.limit_bytes * min(1 - config.gpu_memory_fraction, _FREE_SHARE))


def with_host_cache(file: GGUFFile, arch: Architecture, config: EngineConfig) -> EngineConfig:
    """The configuration with the KV cache that a CPU gets where nobody says how many tokens.

    `cpu_memory_fraction` of the memory that is available beside weights and buffers, as far as
    requests can fill it, and one context at least. It takes memory as it is written. Where launches
    are looked at, or the system tells nothing of its memory, it is one context.
    """
    room = footprint.host_room()
    if config.kv_tokens is not None or config.launch_mode != "off" or room is None:
        return config
    context_length = context_length_of(arch, config)
    needed = footprint.needed_bytes(file, arch, config, context_length)
    draft = draft_needs(file, arch, config)
    left = room.available_bytes - sum(needed.values()) + needed["KV cache"] - draft.fixed_bytes
    left = int(max(left, 0) * draft.share_left(arch, config, 1))
    most = config.max_batch_requests * context_length
    num_tokens = min(
        kv_tokens_in(int(max(left, 0) * config.cpu_memory_fraction), arch, config), most
    )
    return replace(config, kv_tokens=num_tokens) if num_tokens > context_length else config


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What a draft model takes of a process: its weights and buffers, and for each token that the
    KV cache of the model holds."""

    fixed_bytes: int = 0
    bytes_per_token: int = 0

    def share_left(self, arch: Architecture, config: EngineConfig, num_workers: int) -> float:
        """The share of memory for caches that the model's own has; each worker has a draft's."""
        own = arch.kv_bytes_per_token(KV_DTYPES[config.kv_dtype])
        return own / (own + num_workers * self.bytes_per_token) if self.bytes_per_token else 1.0


def draft_needs(file: GGUFFile, arch: Architecture, config: EngineConfig) -> DraftNeeds:
    """What the draft model of `config`, or the head that drafts, takes beside the model of `file`;
    nothing where there is none."""
    if config.spec == "mtp":
        row_bytes = HiddenStates.row_bytes(arch)
        needs = _needs_of(file, head_of(file, arch), arch, config)
        fixed = needs.fixed_bytes + config.step_tokens * row_bytes
        return DraftNeeds(fixed, needs.bytes_per_token + row_bytes)
    if config.draft_model is None:
        return DraftNeeds()
    with open_gguf(Path(config.draft_model)) as own:
        return _needs_of(own, read_architecture(own), arch, config)


def _needs_of(
    file: GGUFFile, own: Architecture, arch: Architecture, config: EngineConfig
) -> DraftNeeds:
    """What a model of `own` takes that drafts for one of `arch`."""
    context_length = context_length_of(arch, config)
    small = draft_config(own, config, context_length, context_length)
    needed = footprint.needed_bytes(file, own, small, context_length_of(own, small))
    fixed = sum(needed.values()) - needed["KV cache"]
    per_token = own.kv_bytes_per_token(KV_DTYPES[small.kv_dtype])
    return DraftNeeds(fixed + fixed // _DRAFT_SPARE, per_token)


def draft_config(
    arch: Architecture, config: EngineConfig, context_length: int, kv_tokens: int
) -> EngineConfig:
    """How a draft model of that architecture runs beside a model of `config`, whose cache holds
    `kv_tokens`: on the same device, in steps as large. What one file alone says is left out."""
    kv_dtype = config.kv_dtype if config.kv_dtype in footprint.kv_dtypes_for(arch) else "f16"
    return replace(
        config,
        context_length=min(context_length, arch.context_length),
        kv_tokens=kv_tokens,
        kv_dtype=kv_dtype,
        max_batch_tokens=config.step_tokens,
        float_products="exact",
        cpu_moe=False,
        n_cpu_moe=0,
        disk_cache=None,
        tokenizer_pre=None,
        chat_template=None,
        chat_template_kwargs=None,
        override_kv=None,
        pooling=None,
        itl_target=None,
        spec="off",
        draft_model=None,
        lora=(),
    )


def weight_bytes(file: GGUFFile) -> int:
    """What the tensors of a file take, which a token reads most of."""
    return sum(info.num_bytes for info in file.tensors.values())


def require_gpu_room(
    device: str, file: GGUFFile, arch: Architecture, config: EngineConfig, room: Room
) -> None:
    """Raises ModelTooLarge, with what would fit, for a model that a GPU with `room` cannot hold.

    Weights are counted as in the file; as a GPU has them they are no smaller.
    """
    needed = footprint.needed_bytes(file, arch, config, context_length_of(arch, config))
    on_host = {spec.name for spec in footprint.host_tensors(file, arch, config)}
    on_gpu = [info for info in file.tensors.values() if info.name not in on_host]
    needed["weights"] = sum(info.num_bytes for info in on_gpu)
    if (draft := draft_needs(file, arch, config)).fixed_bytes:
        num_tokens = config.kv_tokens or context_length_of(arch, config)
        needed["draft model"] = draft.fixed_bytes + draft.bytes_per_token * num_tokens
    num_bytes, used = sum(needed.values()), room.limit_bytes - room.available_bytes
    usable = _usable_bytes(config, room, 0)
    if num_bytes <= usable:
        return
    of_steps = num_bytes - needed["weights"] - needed["KV cache"]  # of a draft model, too
    ways = list(_caches_that_fit(usable - of_steps - needed["weights"], arch, config))
    if (for_weights := usable - of_steps - needed["KV cache"]) > 0:
        num_weights = sum(math.prod(info.shape) for info in on_gpu)
        bits = 8 * for_weights / num_weights
        if bits >= _LEAST_BITS:
            ways.append(f"a file of {bytes_text(for_weights)}, {bits:.1f} bits a weight")
    parts = ", ".join(f"{name} {bytes_text(part)}" for name, part in needed.items())
    fits = ", or ".join(ways) or "a smaller model, or several GPUs"
    settings = ("context_length", "kv_tokens", "kv_dtype")
    raise ModelTooLarge(device, num_bytes, used, room.limit_bytes, parts, settings, fits)


def _caches_that_fit(num_bytes: int, arch: Architecture, config: EngineConfig) -> Iterator[str]:
    """KV caches of so much memory, by their type: contexts of one request, or of all as asked."""
    setting = "context_length" if config.kv_tokens is None else "kv_tokens"
    wanted = config.kv_tokens or context_length_of(arch, config)
    own = arch.kv_bytes_per_token(KV_DTYPES[config.kv_dtype])
    # Of two of one size the one that is asked for, or the one that loses less, which stands last.
    of_size = {
        arch.kv_bytes_per_token(x): name for name, x in footprint.kv_dtypes_for(arch).items()
    }
    of_size[own] = config.kv_dtype
    for per_token, name in sorted(of_size.items(), reverse=True):
        num_tokens = min(num_bytes // per_token, wanted) if per_token else 0
        num_tokens -= num_tokens % config.block_size
        if per_token > own or num_tokens < _LEAST_CONTEXT:
            continue
        cache = "" if name == config.kv_dtype else f" with kv_dtype {name}"
        yield f"{setting} {num_tokens}{cache}"
        if num_tokens >= wanted - wanted % config.block_size:
            return


def kv_tokens_in(num_bytes: int, arch: Architecture, config: EngineConfig) -> int:
    """Tokens of a KV cache of so many bytes, where nobody says how many it holds.

    It is at least one context, and for a single request no more than that.
    """
    context_length = context_length_of(arch, config)
    per_token = arch.kv_bytes_per_token(KV_DTYPES[config.kv_dtype])
    if config.max_batch_requests == 1 or not per_token:
        return context_length
    most = max(config.max_batch_requests * context_length, _MOST_KEPT_TOKENS)
    num_tokens = min(num_bytes // per_token, most)
    # Kernels have a form for numbers of blocks that are multiples of 16: one start as the next.
    return max(num_tokens - num_tokens % (16 * config.block_size), context_length)
