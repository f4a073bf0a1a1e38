"""Layers with a state instead of attention: what a GGUF file's metadata says of them.

Keys and what is fixed per family follow llama.cpp (src/models/qwen35.cpp, qwen3next.cpp, and the
conversion scripts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.errors import BadModelFile, UnsupportedModel
from hypocenter.kernels.recurrent.delta_rule import DeltaHeads
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.facts.state_space import (
    StateSpace,
    read_sizes,
    read_state_space,
)
from hypocenter.model.gguf.file import GGUFFile

_MAX_TAPS = 16
#: Every so many layers have attention, where a file does not say which.
_DEFAULT_INTERVAL = 4


@dataclass(frozen=True, slots=True)
class RecurrenceOfFamily:
    """What holds for all files of a family.

    `heads_by_turns`: value heads take key heads by turns, not several one behind the other the
    same. `joins_steps`: b and a come of one matrix, of each key head those of its value heads.
    `is_convolution`: there are no heads, but gated convolutions alone. `is_state_space`: they are
    of Mamba-2; with `stands_beside` in every layer, beside attention.
    """

    heads_by_turns: bool = True
    joins_steps: bool = False
    is_convolution: bool = False
    is_state_space: bool = False
    stands_beside: bool = False

    @property
    def is_given_by_heads(self) -> bool:
        """Whether files say which layers have attention by giving the others no heads."""
        return self.is_convolution or (self.is_state_space and not self.stands_beside)


@dataclass(frozen=True, slots=True)
class Convolution:
    """Gated short convolutions in the place of attention in all layers but `attention_layers`:
    of `width` channels over `num_taps` tokens."""

    attention_layers: tuple[int, ...]
    width: int
    num_taps: int

    @property
    def values_width(self) -> int:
        """Columns of what is multiplied at its end."""
        return self.width

    @property
    def buffer_widths(self) -> tuple[int, ...]:
        """Columns of each of its buffers of activations."""
        return (self.width,) * 4

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a layer keeps of a sequence, padded as it lies in memory."""
        return {"conv": (self.num_taps - 1, padded_rows(self.width))}


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Gated Delta Nets in the place of attention in all layers but `attention_layers`.

    `num_key_heads` heads of `key_dim` columns for keys and as many for queries, `num_value_heads`
    of `value_dim`; a convolution over `num_taps` tokens before them.
    """

    attention_layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int
    heads_by_turns: bool = True

    @property
    def heads(self) -> DeltaHeads:
        in_turn = 1 if self.heads_by_turns else self.num_value_heads // self.num_key_heads
        return DeltaHeads(self.num_key_heads, self.value_dim, in_turn)

    @property
    def values_width(self) -> int:
        """Columns of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def mixed_width(self) -> int:
        """Columns of queries, keys and values together, which the convolution takes."""
        return 2 * self.num_key_heads * self.key_dim + self.values_width

    @property
    def buffer_widths(self) -> tuple[int, ...]:
        """Columns of each of its buffers of activations."""
        return (self.mixed_width, self.values_width, self.num_value_heads) * 2

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a layer keeps of a sequence, padded as it lies in memory: for the convolution, and
        the state itself."""
        conv = self.num_taps - 1, padded_rows(self.mixed_width)
        return {
            "conv": conv,
            "state": (self.num_value_heads, self.key_dim, padded_rows(self.value_dim)),
        }


AnyRecurrence = Recurrence | Convolution | StateSpace


def read_recurrence(
    file: GGUFFile,
    name: str,
    family: RecurrenceOfFamily | None,
    *,
    num_blocks: int,
    num_layers: int,
    width: int,
    is_bare: bool = False,
) -> AnyRecurrence | None:
    """What `name` models have beside attention, or with `is_bare` in place of all of it; None for
    families of attention alone.

    Raises UnsupportedModel for shapes that we do not run, BadModelFile for numbers that contradict
    one another.
    """
    if family is None:
        return None
    if family.is_convolution:
        num_taps = _num_taps(file, f"{name}.shortconv.l_cache")
        return Convolution(_layers_with_heads(file, name, num_layers), width, num_taps)
    if family.is_state_space:
        layers = tuple(range(0 if is_bare else num_layers))
        if not (family.stands_beside or is_bare):
            layers = _layers_with_heads(file, name, num_layers)
        num_taps = _num_taps(file, f"{name}.ssm.conv_kernel")
        return read_state_space(file, name, layers, num_taps, stands_beside=family.stands_beside)
    sizes = read_sizes(file, name)
    return Recurrence(
        attention_layers=_attention_layers(file, name, num_blocks, num_layers),
        num_key_heads=sizes.num_groups,
        num_value_heads=sizes.num_heads,
        key_dim=sizes.state_dim,
        value_dim=sizes.value_dim,
        num_taps=_num_taps(file, f"{name}.ssm.conv_kernel"),
        heads_by_turns=family.heads_by_turns,
    )


def layers_with_state(recurrence: AnyRecurrence | None, num_layers: int) -> tuple[int, ...]:
    """The layers that carry a state."""
    if recurrence is None:
        return ()
    layers = tuple(range(num_layers))
    if isinstance(recurrence, StateSpace) and recurrence.stands_beside:
        return layers
    return tuple(layer for layer in layers if layer not in recurrence.attention_layers)


def _num_taps(file: GGUFFile, full: str) -> int:
    num_taps = file.integer(full, low=1, high=_MAX_TAPS)
    if num_taps < 2:
        limit = "must be at least 2: a convolution of one token keeps nothing"
        raise UnsupportedModel(file.path, full, num_taps, limit)
    return num_taps


def _layers_with_heads(file: GGUFFile, name: str, num_layers: int) -> tuple[int, ...]:
    """The layers that have heads of keys; files say 0 of the others."""
    full = f"{name}.attention.head_count_kv"
    counts: Any = file.metadata.get(full)
    if not isinstance(counts, np.ndarray) or len(counts) < num_layers:
        limit = f"must give a count for each of {num_layers} layers"
        raise BadModelFile(file.path, full, counts, limit)
    found = tuple(layer for layer in range(num_layers) if counts[layer] != 0)
    if not found:
        raise UnsupportedModel(file.path, full, "no layer", "some layer must have attention")
    return found


def _attention_layers(
    file: GGUFFile, name: str, num_blocks: int, num_layers: int
) -> tuple[int, ...]:
    """Files name the layers that have a state, or every how many layers there is attention."""
    full = f"{name}.attention.recurrent_layers"
    flags: Any = file.metadata.get(full)
    if flags is None:
        interval = file.integer(
            f"{name}.full_attention_interval", _DEFAULT_INTERVAL, low=1, high=num_blocks
        )
        found = tuple(range(interval - 1, num_layers, interval))
        full = f"{name}.full_attention_interval"
    else:
        is_known = isinstance(flags, np.ndarray) and flags.dtype == np.bool_
        if not is_known or flags.shape != (num_blocks,):
            limit = f"must be a flag for each of {num_blocks} blocks"
            raise BadModelFile(file.path, full, flags, limit)
        found = tuple(layer for layer in range(num_layers) if not flags[layer])
    if not found:
        raise UnsupportedModel(file.path, full, "no layer", "some layer must have attention")
    return found
