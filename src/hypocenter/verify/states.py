"""What ops that carry a state must come to: short convolutions, delta rules, state spaces.

A state's error is carried along as the state is: what an exact step makes of it, and what rounding
adds. So a bound grows no faster than the error can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.kernels.recurrent import short_conv
from hypocenter.verify.bounds import EPS, of_chain
from hypocenter.verify.expected import Expected, OpInputs

#: Roundings of a sigmoid and the product with it, and by how much it grows what is off before it.
_OF_SILU, _STEEPEST = 32, 1.1
#: Roundings of an exponential or a logarithm, and what is so small that f32 may lose it.
_OF_EXP, _LEAST = 16, 2.0**-120


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


class _Walk(NamedTuple):
    """What a recurrence comes to: of each token its result, f64 [num_tokens, num_heads, value_dim],
    and the states behind some of them, f64 [num_heads, key_dim, value_dim]; each with its bound."""

    out: Array
    out_off: Array
    states: dict[int, tuple[Array, Array]]


def _pace(given: OpInputs, rows: slice) -> tuple[Array, Array, Array, Array]:
    """The time of each token and head, t = softplus(a + bias), and what a state is multiplied by,
    e**(rate t); how far each may be off stands behind it. All f64 [num_tokens, num_heads]."""
    values = given.values
    num_heads = values["state"].shape[1]
    bias, rates = (values[name][:num_heads].astype(np.float64) for name in ("step_bias", "rates"))
    steps = values["steps"][rows, :num_heads].astype(np.float64)
    waits = np.logaddexp(0, steps + bias)
    off = EPS * (np.abs(steps) + np.abs(bias)) + _OF_EXP * EPS * (1 + waits)
    decay = np.exp(rates * waits)
    share = np.abs(rates) * off + (2 * np.abs(rates * waits) + _OF_EXP) * EPS
    return waits, off, decay, decay * np.expm1(np.minimum(share, 50)) + _LEAST


def _delta_walk(given: OpInputs, first: int, stop: int, state: Array, stops: set[int]) -> _Walk:
    """`delta_rule` of one sequence. The columns of a state are independent, and a step makes none
    longer, for keys have length 1: so errors are lengths of columns."""
    values, number = given.values, given.number
    num_heads, key_dim, value_dim = state.shape
    num_keys, rows = number("num_key_heads"), slice(first, stop)
    head = np.arange(num_heads) // number("heads_in_turn") % num_keys
    x, end = values["x"][rows].astype(np.float64), num_keys * key_dim
    q, k = (x[:, at : at + end].reshape(len(x), num_keys, key_dim)[:, head] for at in (0, end))
    v = x[:, 2 * end : 2 * end + num_heads * value_dim].reshape(len(x), num_heads, value_dim)
    q = q / np.sqrt((q**2).sum(2, keepdims=True) + 1e-6) / key_dim**0.5
    k = k / np.sqrt((k**2).sum(2, keepdims=True) + 1e-6)
    _, _, decay, decay_off = _pace(given, rows)
    b = values["betas"][rows, :num_heads].astype(np.float64)
    beta = np.exp(-np.logaddexp(0, -b))
    beta_share = (2 * np.minimum(np.abs(b), 100) + _OF_EXP) * EPS
    share = 2 * of_chain(key_dim)  # of a sum over keys, and of a length
    off = np.zeros((num_heads, value_dim))
    out, out_off = np.zeros((2, len(x), num_heads, value_dim))
    kept = {}
    for token in range(len(x)):
        d, d_off, weight = decay[token][:, None], decay_off[token][:, None], beta[token][:, None]
        before = _lengths(state)
        state = d[..., None] * state
        off = (d + d_off) * off + (d_off + EPS * d) * before
        delta = v[token] - np.einsum("hk,hkv->hv", k[token], state)
        sizes = np.abs(v[token]) + d * before
        state = state + np.einsum("hk,hv->hkv", k[token], weight * delta)
        off = off + weight * (2 * share + beta_share[token][:, None] + 8 * EPS) * sizes
        off = off + EPS * _lengths(state) + _LEAST
        out[token] = np.einsum("hk,hkv->hv", q[token], state)
        out_off[token] = key_dim**-0.5 * (off + share * _lengths(state)) + _LEAST
        if first + token + 1 in stops:
            kept[first + token + 1] = state.copy(), off[:, None] + np.zeros_like(state)
    return _Walk(out, out_off, kept)


def _lengths(state: Array) -> Array:
    """The lengths of a state's columns, f64 [num_heads, value_dim]."""
    found: Array = np.sqrt((state**2).sum(axis=1))
    return found


def _scan_walk(given: OpInputs, first: int, stop: int, state: Array, stops: set[int]) -> _Walk:
    """`ssm_scan` of one sequence; errors are of each number of the state."""
    values, num_groups, rows = given.values, given.number("num_groups"), slice(first, stop)
    num_heads, state_dim, value_dim = state.shape
    x, end = values["x"][rows].astype(np.float64), num_heads * value_dim
    v = x[:, :end].reshape(len(x), num_heads, value_dim)
    group = np.arange(num_heads) // (num_heads // num_groups)
    k, q = (
        x[:, at : at + num_groups * state_dim].reshape(len(x), num_groups, state_dim)[:, group]
        for at in (end, end + num_groups * state_dim)
    )
    skips = values["skips"][:num_heads].astype(np.float64)[:, None]
    waits, waits_off, decay, decay_off = _pace(given, rows)
    off = np.zeros_like(state)
    out, out_off = np.zeros((2, len(x), num_heads, value_dim))
    kept = {}
    for token in range(len(x)):
        d, d_off = decay[token][:, None, None], decay_off[token][:, None, None]
        off = (d + d_off) * off + (d_off + 2 * EPS * d) * np.abs(state)
        added = np.einsum("hn,hv->hnv", k[token], v[token])
        state = d * state + waits[token][:, None, None] * added
        spare = waits_off[token] + 4 * EPS * waits[token]
        off = off + spare[:, None, None] * np.abs(added) + EPS * np.abs(state) + _LEAST
        out[token] = np.einsum("hn,hnv->hv", q[token], state) + skips * v[token]
        sizes = np.einsum("hn,hnv->hv", np.abs(q[token]), np.abs(state))
        sizes = of_chain(state_dim + 1) * (sizes + np.abs(skips * v[token]))
        out_off[token] = np.einsum("hn,hnv->hv", np.abs(q[token]), off) + sizes + _LEAST
        if first + token + 1 in stops:
            kept[first + token + 1] = state.copy(), off.copy()
    return _Walk(out, out_off, kept)


def _recurrence(walk: Callable[..., _Walk]) -> Callable[[OpInputs], list[Expected]]:
    def rows_and_states(given: OpInputs) -> list[Expected]:
        values = given.values
        value_dim = given.number("value_dim")
        kept = values["state"][..., :value_dim].astype(np.float64)
        before, kept_off = kept.copy(), np.zeros_like(kept)
        num_heads, starts = kept.shape[1], values["sequence_starts"]
        out, out_off = np.zeros((2, given.live, num_heads * value_dim))
        for at in range(int(values["sequence_rows"][given.live - 1]) + 1):
            first, stop = int(starts[at]), int(starts[at + 1])
            saved = int(values["checkpoint_stops"][at])
            state = before[int(values["state_sources"][at])]
            state = state if values["positions"][first] else np.zeros_like(state)
            found = walk(given, first, stop, state, {stop, saved})
            out[first:stop] = found.out.reshape(stop - first, -1)
            out_off[first:stop] = found.out_off.reshape(stop - first, -1)
            slot = int(values["state_slots"][at])
            kept[slot], kept_off[slot] = found.states[stop]
            if saved in found.states and saved > first:
                slot = int(values["checkpoint_slots"][at])
                kept[slot], kept_off[slot] = found.states[saved]
        return [
            Expected("out", out[given.rows], out_off[given.rows], given.rows),
            Expected("state", kept, kept_off, np.arange(len(kept))),
        ]

    return rows_and_states


def _inputs_before(given: OpInputs, sequence: int, first: int) -> Array:
    """The last inputs before a sequence's tokens, f32 [num_kept, channels]; zeros if it begins."""
    state = given.values["state"][int(given.values["state_sources"][sequence])]
    found: Array = state if given.values["positions"][first] else np.zeros_like(state)
    return found


REFERENCES: dict[str, Callable[[OpInputs], list[Expected]]] = {
    "short_conv": convolution_rows,
    "delta_rule": _recurrence(_delta_walk),
    "ssm_scan": _recurrence(_scan_walk),
}
