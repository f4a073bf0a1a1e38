"""Sequences of a step, as ops with a state find them: their tokens, their states, where they begin.

The tokens of a sequence stand one behind the other. Its first position says whether it begins: at
position 0 nothing is read of a state, so what was left there by another sequence does not matter.
A state may be read from another slot than it is left in, and be left in a second one as it is after
some token of the step: so a sequence begins with what another one left, which has no step more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hypocenter.base.tensor import DType, Tensor
from hypocenter.contracts.demands import Arg, Index, Symbols, live_counts, live_rows


def num_sequences(values: Symbols) -> int:
    """How many sequences a step has, by the values of its inputs: rows are counted from 0."""
    num_live = int(values["counts"][0])
    return int(values["sequence_rows"][num_live - 1]) + 1 if num_live else 0


def _live_slots(values: Symbols) -> np.ndarray[Any, Any]:
    return np.arange(values["max_sequences"]) < num_sequences(values)


def _live_checkpoints(values: Symbols) -> np.ndarray[Any, Any]:
    stops: np.ndarray[Any, Any] = values["checkpoint_stops"]
    return _live_slots(values) & (stops > 0)


def _live_starts(values: Symbols) -> np.ndarray[Any, Any]:
    return np.arange(values["max_sequences"] + 1) <= num_sequences(values)


#: What such ops demand of these inputs. The first axis of the state is `num_slots`.
SEQUENCES: tuple[Arg, ...] = (
    Arg(
        "state_slots",
        (DType.I32,),
        "max_sequences",
        index=Index("num_slots", "the states", live=_live_slots, unique=True),
    ),
    Arg(
        "state_sources",
        (DType.I32,),
        "max_sequences",
        index=Index("num_slots", "the states", live=_live_slots),
    ),
    Arg(
        "checkpoint_slots",
        (DType.I32,),
        "max_sequences",
        index=Index("num_slots", "the states", live=_live_checkpoints, unique=True),
    ),
    Arg(
        "checkpoint_stops",
        (DType.I32,),
        "max_sequences",
        index=Index("num_tokens + 1", "the step", live=_live_slots),
    ),
    Arg(
        "sequence_starts",
        (DType.I32,),
        "max_sequences + 1",
        index=Index("num_tokens + 1", "the step", live=_live_starts, monotone=True),
    ),
    Arg(
        "sequence_rows",
        (DType.I32,),
        ">= num_tokens",
        index=Index("max_sequences", "state_slots", live=live_rows("sequence_rows"), monotone=True),
    ),
    # Any number does: it is only held against 0.
    Arg("positions", (DType.I32,), ">= num_tokens"),
    live_counts("num_tokens", 0),
)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the tokens of each sequence are, and its state.

    i32 [max_sequences] each: state_slots, where its state is left; state_sources, where that is
    read; checkpoint_slots, where it is left too, as it is before the row checkpoint_stops of the
    step (0: nowhere). sequence_starts i32 [max_sequences + 1]: its first token, and behind the last
    sequence how many there are; sequence_rows and positions i32 [num_tokens] of each token; counts
    as everywhere. Sequences are in the order of their tokens.
    """

    state_slots: Tensor
    state_sources: Tensor
    checkpoint_slots: Tensor
    checkpoint_stops: Tensor
    sequence_starts: Tensor
    sequence_rows: Tensor
    positions: Tensor
    counts: Tensor

    @property
    def arguments(self) -> dict[str, Tensor]:
        """These, by the names that contracts and kernels have for them."""
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def max_sequences(self) -> int:
        return self.state_slots.shape[0]
