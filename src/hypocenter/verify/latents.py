"""What ops on latents must come to: products of each head, and writes to a cache of latents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hypocenter.base.tensor import DType
from hypocenter.kernels.linear import head_linear
from hypocenter.verify.attending import as_numbers, as_stored, cache_numbers
from hypocenter.verify.bounds import EPS_F16, TINY_F16, of_chain
from hypocenter.verify.expected import Expected, OpInputs


def head_products(given: OpInputs) -> list[Expected]:
    """`head_linear`: what it keeps of each head, and the product behind it. Its weights, which are
    floats, are those that the device holds."""
    rows, values = given.rows, given.values
    num_kept, num_outputs = given.number("num_kept"), given.number("num_outputs")
    weight = as_numbers(values["weight"])[..., :num_outputs]
    num_heads, num_inputs = weight.shape[:2]
    wide = num_inputs + num_kept
    x = values["x"][rows, : num_heads * wide].reshape(len(rows), num_heads, wide)
    is_rounded = given.unit.arguments["weight"].dtype is DType.F16 and not given.on_cpu
    exact = head_linear.reference(x, weight)
    sizes = head_linear.reference(np.abs(x), np.abs(weight))
    bound = of_chain(num_inputs) * sizes
    # A matrix unit that has halves rounds what is multiplied with them, too.
    bound = bound + (2 * EPS_F16 * sizes + TINY_F16 * num_inputs if is_rounded else 0)
    bound[..., :num_kept] = 0
    shape = (len(rows), -1)
    return [Expected("out", exact.reshape(shape), bound.reshape(shape), rows)]


def written_latents(given: OpInputs) -> list[Expected]:
    """`latent_write`: a key is what is rotated and the latent behind it, a value is the latent."""
    arguments, live, rank = given.unit.arguments, given.live, given.number("rank")
    cache = arguments["k_cache"]
    values, block_size, num_rotated = given.values, cache.shape[3], cache.shape[2] - rank
    slots = values["slots"][:live]
    block, offset = slots // block_size, slots % block_size
    latent = values["latent"][:live, :rank].astype(np.float64)
    rotated = values["rotated"][:live, :num_rotated].astype(np.float64)
    found = []
    for name, new in (("k_cache", np.concatenate([rotated, latent], axis=1)), ("v_cache", latent)):
        exact = cache_numbers(given, name)
        bound = np.zeros_like(exact)
        new, off = as_stored(new, np.zeros_like(new), arguments[name].dtype)
        if name == "k_cache":
            exact[block, 0, :, offset], bound[block, 0, :, offset] = new, off
        else:
            exact[block, 0, offset, :rank], bound[block, 0, offset, :rank] = new, off
            bound[block, 0, offset, rank:] = np.inf  # padding may hold anything
        found.append(Expected(name, exact, bound, np.arange(len(exact))))
    return found


REFERENCES: dict[str, Callable[[OpInputs], list[Expected]]] = {
    "head_linear": head_products,
    "latent_write": written_latents,
}
