"""What ops on rows must come to: norms, gates, activations, rows of tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.kernels.rowwise import activation, hadamard, layer_norm, norm
from hypocenter.verify.bounds import EPS, of_chain
from hypocenter.verify.expected import Expected, OpInputs
from hypocenter.verify.file_weights import matrices_of

#: Words of `activation.py` by the numbers that kernels have for them.
GATE_WORDS = {number: word for word, number in activation.GATES.items()}
_ACTIVATION_WORDS = {number: word for word, number in activation.ACTIVATIONS.items()}
#: Roundings of an exponential, a quotient and products around it.
_OF_GATE = 32
#: `gelu_erf` is by a formula that is so far off for each |x| (`activation.py`).
_OF_ERF = 7.5e-8


def written_as(given: OpInputs) -> str:
    """What an op writes beside floats: one of the words of `operands.py`, or ""."""
    names = {arg.name for arg in given.unit.written}
    if "gated_codes" in names:
        return "gated"
    return "written" if "codes" in names else "rounded" if "rounded" in names else ""


def result(given: OpInputs, name: str, exact: Array, bound: Array) -> Expected:
    """What an op makes of rows: itself in `name`, or operands of it."""
    kind = written_as(given)
    if kind:
        return Expected(
            "codes" if kind != "rounded" else kind, exact, bound, given.rows, None, kind
        )
    return Expected(name, exact, bound, given.rows)


def norm_rows(given: OpInputs) -> list[Expected]:
    """`rms_norm`, with and without operands."""
    width, rows, values = given.number("width"), given.rows, given.values
    num_heads = given.unit.arguments.get("num_heads", 1)
    weight = values["weight"][:width].astype(np.float64)
    x = values["x"][rows, : num_heads * width].reshape(len(rows), num_heads, width)
    exact = norm.reference(x, weight, given.number("eps")).reshape(len(rows), -1)
    # Squares are summed in 16 lanes, which are folded; half of that is left of a root.
    bound = of_chain(-(-width // 16) + 16) * np.abs(exact)
    return [_maybe_added(given, exact, bound)]


def layer_norm_rows(given: OpInputs) -> list[Expected]:
    """`layer_norm`, with and without operands."""
    width, rows, values = given.number("width"), given.rows, given.values
    num_heads = given.unit.arguments.get("num_heads", 1)
    shape = (len(rows), num_heads, width)
    x = values["x"][rows, : num_heads * width].reshape(shape).astype(np.float64)
    size = num_heads * width
    weight, bias = (
        values[name][:size].astype(np.float64).reshape(num_heads, width)
        if values.get(name) is not None
        else np.full((num_heads, width), item)
        for name, item in (("weight", 1.0), ("bias", 0.0))
    )
    eps = given.number("eps")
    exact = np.asarray(layer_norm.reference(x, weight, bias, eps), np.float64)
    # The mean is rounded to the grid of the largest number, not of what is left.
    spread = np.abs(x).max(axis=2, keepdims=True) / np.sqrt(x.var(axis=2, keepdims=True) + eps)
    steps = of_chain(-(-width // 16) + 16)
    bound = steps * ((1 + spread) * np.abs(weight) + np.abs(exact) + np.abs(bias))
    return [result(given, "out", exact.reshape(len(rows), -1), bound.reshape(len(rows), -1))]


def _maybe_added(given: OpInputs, exact: Array, bound: Array) -> Expected:
    if given.unit.arguments.get("accumulate"):
        before = given.values["out"][given.rows, : exact.shape[1]].astype(np.float64)
        exact = exact + before
        bound = bound + EPS * (np.abs(before) + np.abs(exact))
    return result(given, "out", exact, bound)


def gate_rows(given: OpInputs) -> list[Expected]:
    """`gate`, with and without operands."""
    width = given.unit.arguments.get("width", given.values["gate"].shape[1])
    gate, up = (given.values[name][given.rows, :width] for name in ("gate", "up"))
    exact, bound = gate_result(gate.astype(np.float64), up.astype(np.float64), given.number("kind"))
    return [result(given, "gate", exact, bound)]


def gate_result(gate: Array, up: Array, kind: int) -> tuple[Array, Array]:
    """What a gate lets through, f64, and how far f32 may be off."""
    with np.errstate(over="ignore"):
        exact = activation.reference(gate, up, GATE_WORDS[kind])
    sizes = np.abs(exact) + 1e-3 * np.abs(up)
    if GATE_WORDS[kind] == "clamped":  # up + 1 loses digits where up is near -1
        sizes = sizes + np.abs(gate)
    # An exponential is off by what its argument is rounded by.
    return exact, (_OF_GATE + 2 * np.minimum(np.abs(gate), 100.0)) * EPS * sizes


def activate_rows(given: OpInputs) -> list[Expected]:
    """`activate`, with and without operands."""
    width = given.unit.arguments.get("width", given.values["x"].shape[1])
    x = given.values["x"][given.rows, :width].astype(np.float64)
    kind = _ACTIVATION_WORDS[given.number("kind")]
    with np.errstate(over="ignore"):
        exact = activation.activated_reference(x, kind)
    bound = (_OF_GATE + 2 * np.minimum(np.abs(x), 100.0)) * EPS * (np.abs(exact) + 1e-3)
    if kind == "gelu_erf":
        bound = bound + _OF_ERF * np.abs(x)
    return [result(given, "x", exact, bound)]


def rounded_rows(given: OpInputs) -> list[Expected]:
    """`quantise` and `round`: the numbers themselves."""
    width = given.number("width")
    exact = given.values["x"][given.rows, :width].astype(np.float64)
    return [result(given, "x", exact, np.zeros_like(exact))]


def scaled_rows(given: OpInputs) -> list[Expected]:
    """`scale`, one rounding."""
    x = given.values["x"][given.rows].astype(np.float64)
    exact = x * float(np.float32(given.number("factor")))
    return [Expected("x", exact, EPS * np.abs(exact), given.rows)]


def capped_rows(given: OpInputs) -> list[Expected]:
    """`softcap`: near zero a hyperbolic tangent by exponentials loses digits of 1."""
    cap = float(given.number("cap"))
    x = given.values["x"][given.rows].astype(np.float64)
    exact = cap * np.tanh(x / cap)
    return [Expected("x", exact, _OF_GATE * EPS * cap + 0 * exact, given.rows)]


def multiplied_rows(given: OpInputs) -> list[Expected]:
    """`hadamard`: a rounding for each step and one for the factor, of all magnitudes together."""
    width, size = given.number("width"), given.number("size")
    x = given.values["x"][given.rows, :width].astype(np.float64)
    sizes = hadamard.sizes_of_sums(x, size)
    bound = (size.bit_length() + 1) * EPS * sizes
    return [Expected("x", hadamard.reference(x, size), bound, given.rows)]


def looked_up_rows(given: OpInputs) -> list[Expected]:
    """`lookup`: scale times code plus minimum; where both are products there are four roundings."""
    (table,) = matrices_of(given.file, given.unit.arguments["table"])
    ids = given.values["token_ids"][given.rows]
    exact = table.exact(ids)
    if not table.dtype.is_quantised:
        bound = np.zeros_like(exact)
    elif given.on_cpu or table.dtype.block_elements != 256:
        bound = 4 * EPS * table.sizes(ids)
    else:  # products of two fields are f16 on a GPU
        bound = 2.01 * 2.0**-11 * table.sizes(ids)
    return [Expected("out", exact, bound, given.rows)]


def gathered_and_rounded(given: OpInputs) -> list[Expected]:
    """`gather_round`: the rows that `sources` names."""
    width = given.number("width")
    exact = given.values["x"][given.values["sources"][given.rows], :width].astype(np.float64)
    return [result(given, "x", exact, np.zeros_like(exact))]


def gate_norm_rows(given: OpInputs) -> list[Expected]:
    """`gate_norm`, in place: what a gate lets through, normed in groups of columns."""
    width, num_groups = given.number("width"), given.number("num_groups")
    size, rows, values = width * num_groups, given.rows, given.values
    gate, x = (values[name][rows, :size].astype(np.float64) for name in ("gate", "x"))
    weight, eps = values["weight"][:size].astype(np.float64), given.number("eps")
    through, off = gate_result(gate, x, activation.GATES["silu"])
    shape = (len(rows), num_groups, width)
    through, off = through.reshape(shape), off.reshape(shape)
    root = np.sqrt((through**2).mean(axis=2, keepdims=True) + eps)
    exact = through / root
    # Of the root as much is off as of all that is summed in it.
    share = np.sqrt((off**2).mean(axis=2, keepdims=True)) / root
    bound = off / root + np.abs(exact) * (share + of_chain(-(-width // 16) + 16))
    exact, bound = (part.reshape(len(rows), size) * weight for part in (exact, bound))
    return [Expected("gate", exact, np.abs(bound), rows)]


def gathered_rows(given: OpInputs) -> list[Expected]:
    """`gather` and `narrow` copy."""
    x = given.values["x"]
    rows = given.values["rows"][given.rows] if "rows" in given.values else given.rows
    width = given.values["out"].shape[1]
    exact = x[rows][:, :width].astype(np.float64)
    return [Expected("out", exact, np.zeros_like(exact), given.rows)]


def added_rows(given: OpInputs) -> list[Expected]:
    """`add_rows`, one rounding."""
    x = given.values["x"][given.rows].astype(np.float64)
    exact = x + given.values["table"][given.values["rows"][given.rows]].astype(np.float64)
    return [Expected("x", exact, EPS * np.abs(exact), given.rows)]


def kept_rows(given: OpInputs) -> list[Expected]:
    """`keep_rows` copies into the rows of a table that it names."""
    exact = given.values["x"][given.rows].astype(np.float64)
    return [Expected("table", exact, np.zeros_like(exact), given.values["rows"][given.rows])]


REFERENCES: dict[str, Callable[[OpInputs], list[Expected]]] = {
    "rms_norm": norm_rows,
    "rms_norm_round": norm_rows,
    "rms_norm_codes": norm_rows,
    "layer_norm": layer_norm_rows,
    "layer_norm_round": layer_norm_rows,
    "layer_norm_codes": layer_norm_rows,
    "gate": gate_rows,
    "gate_round": gate_rows,
    "gate_codes": gate_rows,
    "activate": activate_rows,
    "activate_round": activate_rows,
    "activate_codes": activate_rows,
    "quantise": rounded_rows,
    "round": rounded_rows,
    "scale": scaled_rows,
    "hadamard": multiplied_rows,
    "softcap": capped_rows,
    "lookup": looked_up_rows,
    "gather": gathered_rows,
    "narrow": gathered_rows,
    "gather_round": gathered_and_rounded,
    "gate_norm": gate_norm_rows,
    "add_rows": added_rows,
    "keep_rows": kept_rows,
}
