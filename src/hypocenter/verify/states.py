"""What ops that carry a state must come to: short convolutions. Delta rules and state spaces have
no reference here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.kernels.recurrent import short_conv
from hypocenter.verify.bounds import EPS, of_chain
from hypocenter.verify.expected import Expected, OpInputs

#: Roundings of a sigmoid and the product with it, and by how much it grows what is off before it.
_OF_SILU, _STEEPEST = 32, 1.1


def convolution_rows(given: OpInputs) -> list[Expected]:
    """`short_conv`: what it writes for each token, and the states that it leaves."""
    values, activates = given.values, bool(given.number("activates"))
    weight = values["weight"].astype(np.float64)
    bias = None
    if given.unit.arguments["bias"] is not None:
        bias = values["bias"].astype(np.float64)
    num_kept, channels = values["state"].shape[1:]
    starts = values["sequence_starts"]
    exact, bound = (np.zeros((given.live, channels)) for _ in range(2))
    slots: list[int] = []
    states: list[Array] = []
    share = of_chain(len(weight) + 1)
    for at in range(int(values["sequence_rows"][given.live - 1]) + 1):
        first, stop = int(starts[at]), int(starts[at + 1])
        came = np.concatenate([_inputs_before(given, at, first), values["x"][first:stop]])
        # What came before is part of a longer sequence, of which the last rows are compared.
        with np.errstate(over="ignore"):  # silu of a number far below zero is zero
            wanted = short_conv.reference(came, weight, bias, activates=activates)
        exact[first:stop] = wanted[num_kept:]
        plain = short_conv.reference(came, weight, bias, activates=False)[num_kept:]
        sizes = short_conv.reference(
            np.abs(came), np.abs(weight), None if bias is None else np.abs(bias), activates=False
        )[num_kept:]
        off = share * sizes
        if activates:
            off = _STEEPEST * off + _OF_SILU * EPS * np.abs(plain)
        bound[first:stop] = off
        slots.append(int(values["state_slots"][at]))
        states.append(came[len(came) - num_kept :])
        if (num := int(values["checkpoint_stops"][at]) - first) > 0:
            slots.append(int(values["checkpoint_slots"][at]))
            states.append(came[num : num + num_kept])
    kept = np.stack(states).astype(np.float64)
    return [
        Expected("out", exact[given.rows], bound[given.rows] + 2.0**-120, given.rows),
        Expected("state", kept, np.zeros((1, 1, 1)), np.array(slots)),
    ]


def _inputs_before(given: OpInputs, sequence: int, first: int) -> Array:
    """The last inputs before a sequence's tokens, f32 [num_kept, channels]; zeros if it begins."""
    state = given.values["state"][int(given.values["state_sources"][sequence])]
    found: Array = state if given.values["positions"][first] else np.zeros_like(state)
    return found


REFERENCES: dict[str, Callable[[OpInputs], list[Expected]]] = {"short_conv": convolution_rows}
