"""Keys and values in a latent (DeepSeek-V2, arXiv 2405.04434), as a GGUF file's metadata say.

Keys follow llama.cpp (src/models/deepseek2.cpp and its conversion scripts). Files of two kinds say
the same: older ones give the sizes of heads as they are multiplied out, and newer ones those of the
cache, with the others beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypocenter.base.errors import BadModelFile, UnsupportedModel
from hypocenter.model.gguf.file import GGUFFile

#: Columns of a latent and of the part of a key that is rotated, which attention's kernels can hold.
_RANKS, _ROTATED = (2, 512), (2, 64)
_MAX_COLUMNS = 1 << 12
#: Converters write a tenth of the number that the formula has.
_OF_LOG_MULTIPLIER = 10


@dataclass(frozen=True, slots=True)
class Latent:
    """How heads are made of what the cache holds.

    A key in the cache is `rope_dim` columns that positions turn and a latent of `rank`, which is
    the value too. Multiplied out, a head's key has `plain_dim` columns and those that are rotated,
    and its value `value_dim`. Queries come of a latent of `query_rank` of their own; 0: of x.
    `is_split`: the file holds what makes keys and what makes values by head, in tensors of their
    own.
    """

    rank: int
    rope_dim: int
    plain_dim: int
    value_dim: int
    query_rank: int = 0
    is_split: bool = False

    @property
    def key_dim(self) -> int:
        """Columns of a head's key, multiplied out."""
        return self.plain_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Columns of a key in the cache."""
        return self.rope_dim + self.rank

    @property
    def widest(self) -> int:
        """The most columns that a head has outside of attention."""
        return max(self.key_dim, self.value_dim)


def read_latent(file: GGUFFile, name: str, num_heads: int, max_width: int) -> Latent:
    """The latent of a model of architecture `name`.

    Raises BadModelFile for numbers that contradict one another, UnsupportedModel for what no kernel
    can hold or nobody here computes.
    """
    rank = _count(file, f"{name}.attention.kv_lora_rank", _RANKS)
    rope_dim = _count(file, f"{name}.rope.dimension_count", _ROTATED)
    if rope_dim % 2:
        raise BadModelFile(file.path, f"{name}.rope.dimension_count", rope_dim, "must be even")
    is_split = f"{name}.attention.key_length_mla" in file.metadata
    suffix = "_mla" if is_split else ""
    full = f"{name}.attention.key_length{suffix}"
    key_dim = file.integer(full, low=1, high=_MAX_COLUMNS)
    if key_dim <= rope_dim:
        limit = f"must be above {name}.rope.dimension_count, which is {rope_dim}"
        raise BadModelFile(file.path, full, key_dim, limit)
    full = f"{name}.attention.value_length{suffix}"
    if full in file.metadata or is_split:
        value_dim = file.integer(full, low=1, high=_MAX_COLUMNS)
    else:  # converters of MiniCPM 3 write none
        value_dim = max(file.integer(f"{name}.embedding_length", high=max_width) // num_heads, 1)
    if is_split:
        _expect(file, f"{name}.attention.key_length", rank + rope_dim)
        _expect(file, f"{name}.attention.value_length", rank)
    _expect(file, f"{name}.attention.head_count_kv", 1 if is_split else num_heads)
    full = f"{name}.attention.temperature_scale"
    if growth := file.number(full, 0.0):
        limit = "latent queries that grow with their position are not supported"
        raise UnsupportedModel(file.path, full, growth, limit)
    query_rank = file.integer(f"{name}.attention.q_lora_rank", 0, low=0, high=max_width)
    return Latent(rank, rope_dim, key_dim - rope_dim, value_dim, query_rank, is_split)


def log_multiplier(file: GGUFFile, name: str) -> float:
    """How much scores grow with the logarithm of what yarn stretches positions by; 0: not at all.

    It is mscale_all_dim of transformers (`yarn_apply_mscale`).
    """
    return _OF_LOG_MULTIPLIER * file.number(f"{name}.rope.scaling.yarn_log_multiplier", 0.0)


def score_scale(latent: Latent, multiplier: float, factor: float) -> float:
    """What scores are multiplied by where yarn stretches by `factor`, or nothing does (1)."""
    growth = 1 + 0.1 * multiplier * math.log(max(factor, 1.0))
    return growth**2 / math.sqrt(latent.key_dim)


def _count(file: GGUFFile, full: str, bounds: tuple[int, int]) -> int:
    low, high = bounds
    count = file.integer(full, low=1, high=1 << 20)
    if not low <= count <= high:
        limit = f"attention's kernels hold {low} to {high} columns"
        raise UnsupportedModel(file.path, full, count, limit)
    return count


def _expect(file: GGUFFile, full: str, right: int) -> None:
    """A number that others imply, where the file has it."""
    found = file.integer(full, right, low=0)
    if found != right:
        raise BadModelFile(file.path, full, found, f"the other numbers of attention say {right}")
