"""Mamba-2 layers: what a GGUF file's metadata say of them, and of all heads with a state.

Keys follow llama.cpp (src/models/granite-hybrid.cpp, falcon-h1.cpp, and the conversion scripts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hypocenter.base.errors import BadModelFile
from hypocenter.kernels.recurrent.ssm_scan import ScanHeads
from hypocenter.kernels.weights.row_groups import padded_rows
from hypocenter.model.gguf.file import GGUFFile

MAX_HEADS, MAX_COLUMNS = 1 << 12, 512


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba-2 in the place of attention in all layers but `attention_layers`, or beside it in all.

    `num_heads` heads of `value_dim` columns, with a state of `state_dim` for each; as many in each
    of `num_groups` share what writes and reads their states. A convolution over `num_taps` tokens
    before them.
    """

    attention_layers: tuple[int, ...]
    num_heads: int
    value_dim: int
    state_dim: int
    num_groups: int
    num_taps: int
    stands_beside: bool = False

    @property
    def heads(self) -> ScanHeads:
        return ScanHeads(self.num_groups, self.value_dim)

    @property
    def values_width(self) -> int:
        """Columns of all heads."""
        return self.num_heads * self.value_dim

    @property
    def mixed_width(self) -> int:
        """Columns of values, B and C together, which the convolution takes."""
        return self.values_width + 2 * self.num_groups * self.state_dim

    @property
    def part_rows(self) -> tuple[int, int, int]:
        """Rows of what makes gates, what the convolution takes, and a number of each head."""
        return self.values_width, self.mixed_width, self.num_heads

    @property
    def buffer_widths(self) -> tuple[int, ...]:
        """Columns of each of its buffers of activations."""
        return (*(self.mixed_width, self.values_width) * 2, self.num_heads)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a layer keeps of a sequence, padded as it lies in memory: for the convolution, and
        the state itself."""
        return {
            "conv": (self.num_taps - 1, padded_rows(self.mixed_width)),
            "state": (self.num_heads, self.state_dim, padded_rows(self.value_dim)),
        }


class StateSizes(NamedTuple):
    """Heads with a state, of which as many in each group share what writes and reads it."""

    num_groups: int
    num_heads: int
    value_dim: int
    state_dim: int


def read_sizes(file: GGUFFile, name: str) -> StateSizes:
    """The sizes of `name` models. Raises BadModelFile for numbers that contradict one another."""

    def count(key: str, high: int) -> int:
        return file.integer(f"{name}.ssm.{key}", low=1, high=high)

    num_groups = count("group_count", MAX_HEADS)
    num_heads = count("time_step_rank", MAX_HEADS)
    if num_heads % num_groups:
        limit = f"must be a multiple of {name}.ssm.group_count, which is {num_groups}"
        raise BadModelFile(file.path, f"{name}.ssm.time_step_rank", num_heads, limit)
    inner = count("inner_size", MAX_HEADS * MAX_COLUMNS)
    value_dim, rest = divmod(inner, num_heads)
    if rest or value_dim > MAX_COLUMNS:
        limit = f"must be {num_heads} heads of at most {MAX_COLUMNS} columns"
        raise BadModelFile(file.path, f"{name}.ssm.inner_size", inner, limit)
    return StateSizes(num_groups, num_heads, value_dim, count("state_size", MAX_COLUMNS))


def read_state_space(
    file: GGUFFile,
    name: str,
    attention_layers: tuple[int, ...],
    num_taps: int,
    *,
    stands_beside: bool,
) -> StateSpace:
    """The state space of `name` models. Raises BadModelFile for numbers that contradict one
    another."""
    sizes = read_sizes(file, name)
    return StateSpace(
        attention_layers=attention_layers,
        num_heads=sizes.num_heads,
        value_dim=sizes.value_dim,
        state_dim=sizes.state_dim,
        num_groups=sizes.num_groups,
        num_taps=num_taps,
        stands_beside=stands_beside,
    )
