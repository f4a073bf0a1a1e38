"""What the layers of one model may differ in, as a GGUF file's metadata give it.

Keys are those of the GGUF specification; what is fixed per family is in `families.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hypocenter.base.errors import MISSING, BadModelFile, UnsupportedModel
from hypocenter.base.tensor import DType
from hypocenter.model.facts.families import Family
from hypocenter.model.facts.latent import Latent
from hypocenter.model.gguf.file import GGUFFile

MAX_HEADS = 1 << 16
MAX_WIDTH = 1 << 20
MAX_CONTEXT = 1 << 30
#: Of Mistral 7B v0.1, as its own configuration has it; later ones have none.
_MISTRAL_WINDOW = 4096
#: Columns of a head that the attention kernels can hold.
HEAD_DIMS = (2, 512)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the layers of a model may differ in."""

    num_kv_heads: int
    head_dim: int
    ffn_width: int
    #: Positions that its queries look back on, themselves included; 0: all.
    window: int = 0
    #: The layer of which it reads keys and values; None: it has its own.
    kv_source: int | None = None
    #: Columns of the latent that is its values and the end of its keys; 0: heads have their own.
    rank: int = 0

    @property
    def kv_width(self) -> int:
        """Columns of a token's keys, and at most of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Columns of a head's values in the KV cache."""
        return self.rank or self.head_dim

    @property
    def value_pitch(self) -> int:
        """The same as they lie there, padded to 16."""
        return -(-self.value_dim // 16) * 16

    def is_whole_blocks_of(self, dtype: DType) -> bool:
        """Whether a head's keys and values, or a latent and what stands before it, are blocks of
        `dtype` without a rest."""
        return all(size % dtype.block_elements == 0 for size in (self.head_dim, self.value_dim))


class HeadDims(NamedTuple):
    """Columns of a head in layers that see all positions, and in those with a window."""

    whole: int
    local: int


def read_head_dims(
    file: GGUFFile, name: str, width: int, num_heads: int, latent: Latent | None = None
) -> HeadDims:
    """The sizes of a model of architecture `name`; with a latent what the cache has of one, and
    without heads as small as heads are.

    Raises UnsupportedModel where keys and values differ, BadModelFile for what no kernel can hold.
    """
    if latent is not None:
        return HeadDims(latent.cached_dim, latent.cached_dim)
    if not num_heads:
        return HeadDims(HEAD_DIMS[0], HEAD_DIMS[0])
    head_dim, (low, high) = width // num_heads, HEAD_DIMS
    is_named = f"{name}.attention.key_length" in file.metadata
    if not is_named and not low <= head_dim <= high:
        limit = f"heads have {low} to {high} columns, and {width} / heads is {head_dim}"
        raise BadModelFile(file.path, f"{name}.attention.head_count", num_heads, limit)
    whole = _head_dim(file, name, "", head_dim)
    return HeadDims(whole, _head_dim(file, name, "_swa", whole))


def read_shapes(
    file: GGUFFile,
    name: str,
    family: Family,
    *,
    num_blocks: int,
    num_heads: int,
    head_dims: HeadDims,
    latent: Latent | None = None,
) -> tuple[LayerShape, ...]:
    """The shape of each of `num_blocks` layers.

    Raises UnsupportedModel for windows that the family does not know, BadModelFile for numbers
    that contradict one another.
    """
    if family.is_bare:
        return (LayerShape(num_kv_heads=1, head_dim=head_dims.whole, ffn_width=0),) * num_blocks
    key = "attention.head_count_kv"
    kv_heads = (1,) * num_blocks
    if latent is None:
        # Layers without attention may have none; what theirs say means nothing.
        low = 0 if family.recurrence is not None and family.recurrence.is_given_by_heads else 1
        kv_heads = _each_layer(file, name, key, MAX_HEADS, num_blocks, default=num_heads, low=low)
        kv_heads = tuple(count or max(kv_heads) or 1 for count in kv_heads)
    for num_kv_heads in kv_heads:
        if num_heads % num_kv_heads:
            limit = f"must divide {num_heads} heads"
            raise BadModelFile(file.path, f"{name}.{key}", num_kv_heads, limit)
    ffn_width = None
    if family.recurrence is not None and family.experts is not None:  # none is dense
        full = f"{name}.expert_feed_forward_length"
        ffn_width = file.integer(full, None, low=1, high=MAX_WIDTH)
    key = "feed_forward_length"
    ffn_widths = _each_layer(file, name, key, MAX_WIDTH, num_blocks, default=ffn_width)
    windows = _windows(file, name, family, num_blocks)
    sources = _sources(file, name, windows)
    return tuple(
        LayerShape(
            num_kv_heads=kv_heads[index if source is None else source],
            head_dim=head_dims.local if windows[index] else head_dims.whole,
            ffn_width=ffn_widths[index],
            window=windows[index],
            kv_source=source,
            rank=latent.rank if latent is not None else 0,
        )
        for index, source in enumerate(sources)
    )


def refuse_sections(file: GGUFFile, name: str, family: Family) -> None:
    """Raises UnsupportedModel for rotations of pictures that a family does not have.

    Multimodal files (GLM-4.1V) order the rows of q and k for them.
    """
    full = f"{name}.rope.dimension_sections"
    if full in file.metadata and not family.has_sections:
        sections = list(file.numbers(full))
        limit = "rotations in sections are not supported"
        raise UnsupportedModel(file.path, full, sections, limit)


def read_counts(
    file: GGUFFile, name: str, key: str, high: int, default: int | None = None, low: int = 1
) -> tuple[int, ...]:
    """A count from `low` on that files give once, or once per layer; as many as the file has."""
    full = f"{name}.{key}"
    value = file.metadata.get(full)
    if value is None and default is not None:
        return (default,)
    if value is None or isinstance(value, int):
        return (file.integer(full, low=low, high=high),)
    values = file.numbers(full)
    if not np.issubdtype(values.dtype, np.integer):
        found = f"an array of {values.dtype.name}"
        raise BadModelFile(file.path, full, found, "counts must be integers")
    if not values.size:
        raise BadModelFile(file.path, full, "empty", "must give a count for each layer")
    counts = tuple(int(count) for count in values)
    for count in counts:
        if not low <= count <= high:
            raise BadModelFile.out_of_range(file.path, full, count, low, high)
    return counts


def _sources(file: GGUFFile, name: str, windows: tuple[int, ...]) -> list[int | None]:
    """The layer whose keys and values each layer reads: the last ones have none of their own.

    That is the last one of its kind that has (transformers, `Gemma4TextAttention`).
    """
    full, num_layers = f"{name}.attention.shared_kv_layers", len(windows)
    num_own = num_layers - file.integer(full, 0, low=0, high=num_layers - 1)
    last = {window: layer for layer, window in enumerate(windows[:num_own])}
    for layer in range(num_own, num_layers):
        if windows[layer] not in last:
            limit = f"no layer before them sees what layer {layer} sees"
            raise BadModelFile(file.path, full, num_layers - num_own, limit)
    return [None if layer < num_own else last[windows[layer]] for layer in range(num_layers)]


def _each_layer(
    file: GGUFFile,
    name: str,
    key: str,
    high: int,
    num_blocks: int,
    default: int | None = None,
    low: int = 1,
) -> tuple[int, ...]:
    counts = read_counts(file, name, key, high, default, low)
    if len(set(counts)) == 1:
        return (counts[0],) * num_blocks
    if len(counts) < num_blocks:
        limit = f"must give one for each of {num_blocks} layers"
        raise BadModelFile(file.path, f"{name}.{key}", f"{len(counts)} counts", limit)
    return counts[:num_blocks]


def _head_dim(file: GGUFFile, name: str, kind: str, default: int) -> int:
    (low, high), full = HEAD_DIMS, f"{name}.attention.key_length{kind}"
    head_dim = file.integer(full, default, low=low, high=high)
    of_values = f"{name}.attention.value_length{kind}"
    value_dim = file.integer(of_values, head_dim, low=1, high=high)
    if value_dim != head_dim:
        limit = f"values must be as long as keys ({head_dim})"
        raise UnsupportedModel(file.path, of_values, value_dim, limit)
    if head_dim % 2:
        raise BadModelFile(file.path, full, head_dim, "must be even for rotary positions")
    return head_dim


def _windows(file: GGUFFile, name: str, family: Family, num_blocks: int) -> tuple[int, ...]:
    """How far each layer looks back; 0: it sees all positions."""
    full = _window_key(name)
    has_default = family.default_window_layers in (0, num_blocks)
    default = family.default_window if has_default else 0
    window = file.integer(full, default, low=0, high=MAX_CONTEXT)
    if not window:
        return (0,) * num_blocks
    if not family.has_window:
        # Qwen 2 has it in some layers only, which ones its files do not say.
        limit = f"for {name} models we do not know which layers have it"
        raise UnsupportedModel(file.path, full, window, limit)
    full = f"{name}.attention.sliding_window_pattern"
    if family.names_windows:
        return tuple(
            window * has_window for has_window in _read_named_windows(file, full, num_blocks)
        )
    pattern = family.window_pattern
    implied = [not pattern or layer % pattern < pattern - 1 for layer in range(num_blocks)]
    expect_pattern(file, full, pattern, implied)
    return tuple(window * has_window for has_window in implied)


def _read_named_windows(file: GGUFFile, full: str, num_blocks: int) -> list[bool]:
    named = file.metadata.get(full)
    if not isinstance(named, np.ndarray) or named.dtype != np.bool_ or len(named) < num_blocks:
        limit = f"must say of each of {num_blocks} layers whether it has a window"
        raise BadModelFile(file.path, full, MISSING if named is None else named, limit)
    flags: list[bool] = named[:num_blocks].tolist()
    return flags


def expect_pattern(file: GGUFFile, full: str, pattern: int, implied: list[bool]) -> None:
    """Converters may name which layers have a window; it must be what the family implies.

    They write every how many layers there is none, or a flag for each layer. Raises
    UnsupportedModel for anything else.
    """
    named = file.metadata.get(full)
    if named is None:
        return
    if isinstance(named, np.ndarray) and named.dtype == np.bool_:
        named = named.tolist()
        if pattern and named == implied:
            return
    elif isinstance(named, int) and named == pattern:
        return
    raise UnsupportedModel(file.path, full, named, f"must be {pattern}")


def lost_window(file: GGUFFile, name: str, context_length: int) -> str:
    """What a converter left out of a file of the architecture `name`, and how to put it back.

    Mistral 7B v0.1 is a llama file: its converters drop the window, and llama.cpp runs it without.
    Empty for all other files, and for contexts that no window cuts.
    """
    is_first = name == "llama" and "v0.1" in _name_of_mistral(file)
    has_it = _window_key(name) in file.metadata or f"{name}.expert_count" in file.metadata
    if not is_first or has_it or context_length <= _MISTRAL_WINDOW:
        return ""
    return (
        f"{file.path.name}: Mistral 7B v0.1 looks back {_MISTRAL_WINDOW} positions, which its "
        f"converter left out; --override-kv {_window_key(name)}=int:{_MISTRAL_WINDOW} puts it back"
    )


def _window_key(name: str) -> str:
    return f"{name}.attention.sliding_window"


def _name_of_mistral(file: GGUFFile) -> str:
    """What the file calls itself, where that has the name Mistral; else nothing."""
    keys = ("general.name", "general.basename", "general.version", "general.finetune")
    found = [file.metadata[key] for key in keys if key in file.metadata]
    text = " ".join(value for value in found if isinstance(value, str)).lower()
    return text if "mistral" in text else ""
