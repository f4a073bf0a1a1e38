"""What rotation, writes to the cache, and attention over it must come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hypocenter.base.dtypes import Array
from hypocenter.base.tensor import DType
from hypocenter.kernels.attention import rope
from hypocenter.kernels.rowwise import norm
from hypocenter.verify.block_caches import numbers_of_cache, numbers_of_rows, rounded_rows
from hypocenter.verify.bounds import EPS, EPS_F16, TINY_F16, Scoring, of_attention, of_chain
from hypocenter.verify.expected import Expected, OpInputs
from hypocenter.verify.rowwise import result


def _rotation(given: OpInputs, name: str, num_heads: int, norm_name: str) -> tuple[Array, Array]:
    """Heads of all live rows, normed where they are and rotated: f64 [rows, heads, dim]; and how
    far they may be off."""
    head_dim = given.number("head_dim")
    values, live = given.values, given.live
    heads = values[name][:live, : num_heads * head_dim].reshape(live, num_heads, head_dim)
    numbers, share = heads.astype(np.float64), 4 * EPS
    weight = values.get(norm_name)
    if weight is not None:
        numbers = norm.reference(heads, weight[:head_dim].astype(np.float64), given.number("eps"))
        share += of_chain(-(-head_dim // 16) + 16)
    at = values["positions"][:live]
    cos, sin = (values[part][at].astype(np.float64) for part in ("cos", "sin"))
    style = "normal" if given.number("neighbours") else "neox"
    exact = rope.reference(numbers, cos, sin, style)
    factor = max(float(np.abs(cos).max(initial=1)), float(np.abs(sin).max(initial=1)))
    size = np.abs(numbers).max(axis=2, keepdims=True) * factor
    return exact, share * size + 0 * exact


def rotated_rows(given: OpInputs) -> list[Expected]:
    """`rope`, in place."""
    num_heads, head_dim = given.number("num_heads"), given.number("head_dim")
    exact, bound = _rotation(given, "x", num_heads, "")
    shape = (given.live, num_heads * head_dim)
    rows = given.rows
    return [Expected("x", exact.reshape(shape)[rows], bound.reshape(shape)[rows], rows)]


def rotated_and_written(given: OpInputs) -> list[Expected]:
    """`rope_write`: q in place, and both caches, of which all that is not written stays."""
    num_heads, head_dim = given.number("num_heads"), given.number("head_dim")
    q, off = _rotation(given, "q", num_heads, "q_norm")
    shape, rows = (given.live, num_heads * head_dim), given.rows
    num_kv_heads = given.unit.arguments["k_cache"].shape[1]
    k, k_off = _rotation(given, "k", num_kv_heads, "k_norm")
    return [
        Expected("q", q.reshape(shape)[rows], off.reshape(shape)[rows], rows),
        *_cache_contents(given, k, k_off, num_kv_heads, head_dim),
    ]


def written_rows(given: OpInputs) -> list[Expected]:
    """`kv_write`."""
    cache = given.unit.arguments["k_cache"]
    num_kv_heads, head_dim = cache.shape[1], cache.shape[2]
    live = given.live
    k = given.values["k"][:live, : num_kv_heads * head_dim].astype(np.float64)
    k = k.reshape(live, num_kv_heads, head_dim)
    return _cache_contents(given, k, np.zeros_like(k), num_kv_heads, head_dim)


def _cache_contents(
    given: OpInputs, k: Array, k_off: Array, num_kv_heads: int, head_dim: int
) -> list[Expected]:
    live, arguments = given.live, given.unit.arguments
    v = given.values["v"][:live, : num_kv_heads * head_dim].astype(np.float64)
    v = v.reshape(live, num_kv_heads, head_dim)
    block_size = arguments["k_cache"].shape[3]
    slots = given.values["slots"][:live]
    block, offset = slots // block_size, slots % block_size
    found = []
    for name, new, off in (("k_cache", k, k_off), ("v_cache", v, np.zeros_like(v))):
        exact = cache_numbers(given, name)
        bound = np.zeros_like(exact)
        new, off = as_stored(new, off, arguments[name].dtype)
        if name == "k_cache":
            exact[block, :, :, offset], bound[block, :, :, offset] = new, off
        else:
            exact[block, :, offset, :head_dim] = new
            bound[block, :, offset, :head_dim] = off
            bound[block, :, offset, head_dim:] = np.inf  # padding may hold anything
        found.append(Expected(name, exact, bound, np.arange(len(exact))))
    return found


def as_stored(new: Array, off: Array, dtype: DType) -> tuple[Array, Array]:
    """Rows of new keys or values, each off by up to `off`, as a cache of that type holds them."""
    if dtype.is_quantised:
        return rounded_rows(new, off, dtype)
    is_f16 = dtype is DType.F16
    return new, off + (EPS_F16 * np.abs(new) + TINY_F16 if is_f16 else EPS * np.abs(new))


def cache_numbers(given: OpInputs, name: str) -> Array:
    """A whole cache before the op ran, as float64."""
    dtype = given.unit.arguments[name].dtype
    values = given.values[name]
    return numbers_of_cache(name, values, dtype) if dtype.is_quantised else as_numbers(values)


def as_numbers(values: Array) -> Array:
    """A cache's host copy, floats or bits of f16, as float64."""
    halves = values.view(np.float16) if values.dtype == np.uint16 else values
    return halves.astype(np.float64)


def attended_rows(given: OpInputs) -> list[Expected]:
    """`attention`, whole, or by tiles that are folded."""
    arguments, rows = given.unit.arguments, given.rows
    dtype = arguments["k_cache"].dtype
    num_heads, dim = arguments["num_heads"], arguments["k_cache"].shape[2]
    value_dim = arguments["value_dim"]
    exact = np.zeros((len(rows), num_heads * value_dim))
    bound = np.zeros_like(exact)
    # A GPU multiplies halves, which it makes of blocks, too.
    is_f16 = (dtype is DType.F16 or dtype.is_quantised) and not given.on_cpu
    of_halves = EPS_F16 if is_f16 and dtype.is_quantised else 0.0
    for at, row in enumerate(rows):
        q = given.values["q"][row, : num_heads * dim].reshape(1, num_heads, dim)
        k, v = _visible_keys(given, int(row), value_dim)
        right, off = of_attention(
            q,
            k,
            v,
            Scoring(
                arguments["scale"],
                arguments["window"],
                arguments["softcap"],
                _sinks(given, num_heads),
            ),
            is_f16=is_f16,
        )
        off = off + _of_scores(q, k, v, arguments, of_halves)
        exact[at], bound[at] = right.reshape(-1), off.reshape(-1)
    return [result(given, "out", exact, bound)]


def _of_scores(q: Array, k: Array, v: Array, arguments: Any, of_halves: float) -> float:
    """What rounded scores change: each weight by a share of what its score is off. `of_halves`: of
    keys and values so much is off as well."""
    sizes = np.abs(q).astype(np.float64).sum(axis=2).max() * float(np.abs(k).max())
    off = (of_chain(-(-k.shape[2] // 16)) + of_halves) * sizes * arguments["scale"]
    # Whatever weights are, what they weigh is off by twice the largest value at most.
    return float((min(2 * off, 2.0) + of_halves) * np.abs(v).max())


def _sinks(given: OpInputs, num_heads: int) -> Array | None:
    sinks = given.values.get("sinks")
    return None if sinks is None else sinks[:num_heads].astype(np.float64)


def _visible_keys(given: OpInputs, row: int, value_dim: int) -> tuple[Array, Array]:
    """Keys and values up to a row's position, f64 [num_keys, kv heads, dim]."""
    values = given.values
    position = int(values["positions"][row])
    block_size = given.unit.arguments["k_cache"].shape[3]
    sequence = int(values["sequence_rows"][row])
    key = np.arange(position + 1)
    block = values["block_tables"][sequence, key // block_size]
    offset = key % block_size
    k, v = values["k_cache"][block, :, :, offset], values["v_cache"][block, :, offset]
    dtype = given.unit.arguments["k_cache"].dtype
    if dtype.is_quantised:
        return numbers_of_rows(k, dtype), numbers_of_rows(v, dtype)[..., :value_dim]
    return as_numbers(k), as_numbers(v[..., :value_dim])


REFERENCES: dict[str, Callable[[OpInputs], list[Expected]]] = {
    "rope": rotated_rows,
    "rope_write": rotated_and_written,
    "kv_write": written_rows,
    "attention": attended_rows,
    "attention_split": attended_rows,
}
