"""Changes of the engine that do no harm: the doctor must find nothing, though so much differs.

Each run is compared with that of its twin, as with `--good`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from faults.lab import Lab
from faults.victim import Harmless, Planted, victims
from hypocenter.device.inputs import Inputs
from hypocenter.device.plan import PlanBuilder
from hypocenter.engine.kv_cache import KVCache
from hypocenter.model.layers import activations, layer_ops, step_buffers
from hypocenter.model.layers.step_buffers import KVPages

_HARMLESS: dict[str, Harmless] = {}


def _harmless(
    title: str,
) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
    """Registers the function that makes a change under its own name."""

    def register(plant: Callable[[Lab], None]) -> Callable[[Lab], None]:
        name = plant.__name__
        _HARMLESS[name] = Harmless(name=name, title=title, plant=plant)
        return plant

    return register


def harmless() -> list[Harmless]:
    """All harmless changes, by name."""
    return [_HARMLESS[name] for name in sorted(_HARMLESS)]


def find(names: Sequence[str]) -> list[Planted]:
    """Harmless changes and victims of these names; raises UsageError for one that nobody has."""
    others = [name for name in names if name not in _HARMLESS]
    changes = [_HARMLESS[name] for name in names if name in _HARMLESS]
    return [*changes, *(victims(others) if others else ())]


# -- settings -------------------------------------------------------------------------------------


@_harmless("the context, and with it tables and block tables, is longer")
def longer_context(lab: Lab) -> None:
    lab.config["context_length"] = 96


@_harmless("a step may hold twice the tokens, so that all buffers are larger")
def wider_steps(lab: Lab) -> None:
    lab.config["max_batch_tokens"] = 8


@_harmless("a prompt is read one token a step")
def narrower_steps(lab: Lab) -> None:
    lab.config["max_batch_tokens"] = 1


@_harmless("more requests may run together")
def more_requests(lab: Lab) -> None:
    lab.config["max_batch_requests"] = 3


@_harmless("the cache has more blocks than anybody needs")
def larger_cache(lab: Lab) -> None:
    lab.config["kv_tokens"] = 160


@_harmless("a block of the cache holds twice the tokens")
def larger_blocks(lab: Lab) -> None:
    lab.config["block_size"] = 32


@_harmless("keys and values are kept in f32 and not in f16")
def cache_of_f32(lab: Lab) -> None:
    lab.config["kv_dtype"] = "f32"


@_harmless("no request reads another one's blocks")
def no_prefix_cache(lab: Lab) -> None:
    lab.config["prefix_cache"] = False


@_harmless("attention is made of its parts, by other kernels")
def attention_in_parts(lab: Lab) -> None:
    lab.config["attention"] = "parts"


@_harmless("a seed is given, and the likeliest token taken all the same")
def unused_seed(lab: Lab) -> None:
    lab.sampling["seed"] = 7


@_harmless("top_k and top_p filter tokens, and the likeliest is taken all the same")
def unused_filters(lab: Lab) -> None:
    lab.sampling |= {"top_k": 5, "top_p": 0.9}


@_harmless("the GPU is one of another vendor")
def another_gpu(lab: Lab) -> None:
    lab.config["device"] = "sim:h200"


@_harmless("another request ran before")
def a_request_before(lab: Lab) -> None:
    lab.warm_up = [[9, 8]]


# -- memory ---------------------------------------------------------------------------------------


@_harmless("blocks of the cache are given out from the other end")
def blocks_from_the_other_end(lab: Lab) -> None:
    def turn(original: Any, cache: KVCache, *given: Any, **named: Any) -> None:
        original(cache, *given, **named)
        cache._blank.reverse()

    lab.wrap(KVCache, "__init__", turn)


@_harmless("two buffers have other names")
def renamed_buffers(lab: Lab) -> None:
    def rename(original: Any, name: str, *given: Any, **named: Any) -> Any:
        return original({"x": "stream", "hidden": "normed"}.get(name, name), *given, **named)

    lab.wrap(activations, "allocate", rename)


@_harmless("buffers of activations have rows that nobody uses")
def spare_rows(lab: Lab) -> None:
    def make_longer(original: Any, cls: Any, facts: Any, max_tokens: int, **named: Any) -> Any:
        return original(cls, facts, max_tokens + 3, **named)

    lab.wrap(activations.Activations, "allocate", make_longer)


@_harmless("buffers of activations begin undefined")
def undefined_buffers(lab: Lab) -> None:
    lab.leave_undefined(activations.Activations)


@_harmless("the positions lie in memory of their own")
def positions_set_apart(lab: Lab) -> None:
    lab.set_apart("positions")


@_harmless("inputs of a step lie in another order in their memory")
def other_order_of_inputs(lab: Lab) -> None:
    def turn(name: str, owner: str, shapes: Any, **named: Any) -> Inputs:
        return Inputs(name, owner, dict(reversed(shapes.items())), **named)

    lab.patch(step_buffers, "Inputs", turn)


@_harmless("values of the cache are allocated before keys")
def values_before_keys(lab: Lab) -> None:
    def turn(original: Any, cls: Any, facts: Any, *sizes: Any, **named: Any) -> KVPages:
        first = original(cls, facts, *sizes, **named)
        second = original(cls, facts, *sizes, **named)
        return KVPages(second.keys, first.values)

    lab.wrap(KVPages, "allocate", turn)


# -- launches -------------------------------------------------------------------------------------


@_harmless("every launch has twice the threads")
def twice_the_threads(lab: Lab) -> None:
    def double(
        original: Any, plan: PlanBuilder, *given: Any, num_warps: int = 4, **named: Any
    ) -> None:
        original(plan, *given, num_warps=2 * num_warps, **named)

    lab.wrap(PlanBuilder, "add_gpu", double)


@_harmless("the row of each norm is held in a block of twice the columns")
def larger_block_of_the_norm(lab: Lab) -> None:
    lab.edit("norm_gpu", ("BLOCK=triton.next_power_of_2(width),\n    )", _TWICE))


_TWICE = "BLOCK=2 * triton.next_power_of_2(width),\n    )"


@_harmless("one program of a lookup copies 64 columns and not 256")
def smaller_block_of_the_lookup(lab: Lab) -> None:
    lab.edit("embedding_gpu", ("_BLOCK = 256", "_BLOCK = 64"))


@_harmless("each norm is made twice, from the same rows")
def norm_made_twice(lab: Lab) -> None:
    def twice(original: Any, plan: Any, x: Any, *given: Any, **named: Any) -> None:
        original(plan, x, *given, **named)
        if given[2] is not x:
            original(plan, x, *given, **named)

    lab.wrap(layer_ops, "rms_norm", twice)


@_harmless("products of one input are made in another order")
def products_in_another_order(lab: Lab) -> None:
    def turn(original: Any, plan: Any, x: Any, products: Any, *given: Any, **named: Any) -> None:
        original(plan, x, list(reversed(products)), *given, **named)

    lab.wrap(layer_ops, "linear_several", turn)


# -- kernels --------------------------------------------------------------------------------------


@_harmless("rope_write has lines of comment, and names of its own")
def other_names_in_a_kernel(lab: Lab) -> None:
    stored = "tl.store(q_start + first, a, mask=live)"
    turned = "        a, b = rotate(a, b, cos, sin)\n        "
    lab.edit(
        "rope_write_gpu",
        ("    pair = tl.arange(0, PAIRS)\n", "    # A pair.\n    pair = tl.arange(0, PAIRS)\n"),
        (turned + stored, turned.replace("a, b =", "c, b =") + stored.replace("a,", "c,")),
    )


@_harmless("a mean is summed of parts that were divided before")
def mean_of_divided_squares(lab: Lab) -> None:
    lab.edit("norm_gpu", ("tl.sum(x * x, axis=0) / width", "tl.sum(x * x / width, axis=0)"))


@_harmless("a sigmoid is computed in another form")
def sigmoid_in_another_form(lab: Lab) -> None:
    lab.edit("activation_gpu", ("1.0 / (1.0 + tl.exp(-x))", "tl.exp(x) / (tl.exp(x) + 1.0)"))


@_harmless("a row of zeros is added to each sum of squares")
def another_epsilon_of_nothing(lab: Lab) -> None:
    lab.edit("norm_gpu", ("mean_square + eps)", "mean_square + eps + 0.0 * width)"))
