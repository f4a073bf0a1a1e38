"""The items of a kernel's outer loop, as several threads share them: each takes the next one.

`pool.py` says when they are open.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import RefType, iternext_impl, lower_builtin
from numba.extending import intrinsic, models, register_model

from hypocenter.device.cpu.shared_state import (
    NUM_REGIONS_OFFSET,
    REGION_WORDS,
    REGIONS_OFFSET,
    TICKET_SYMBOL,
)


class _Items(types.SimpleIteratorType):  # type: ignore[misc]
    """What is left of 0 .. count - 1, shared with other threads."""


_items = _Items("items", types.intp)


@register_model(_Items)
class _ItemsModel(models.StructModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: _Items) -> None:
        place = types.CPointer(types.intp)
        members = [
            ("count", types.intp),
            ("tag", types.intp),
            ("num_regions", types.intp),
            ("region", place),
            ("num_left", place),
        ]
        super().__init__(manager, kind, members)


def _ticket(builder: Any) -> Any:
    known = builder.module.globals
    if TICKET_SYMBOL in known:
        return known[TICKET_SYMBOL]
    return cgutils.add_global_variable(builder.module, ir.IntType(64), TICKET_SYMBOL)


@intrinsic  # type: ignore[untyped-decorator]
def items(typing: Any, count: Any) -> Any:
    """The items of a `shared` kernel that this thread takes: of its own region in rising order,
    then what is left of the others.

    Whoever calls the kernel leaves the thread's number where a result would go.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made, word = cgutils.create_struct_proxy(_items)(context, builder), ir.IntType(64)
        ticket = _ticket(builder)
        made.count, made.tag = args[0], builder.load_atomic(ticket, "seq_cst", 8)
        number = builder.gep(ticket, [ir.Constant(word, NUM_REGIONS_OFFSET)])
        made.num_regions = builder.load(number)
        thread = builder.load(builder.bitcast(builder.function.args[0], word.as_pointer()))
        made.region = cgutils.alloca_once_value(builder, thread)
        is_open = builder.icmp_signed(">=", made.tag, ir.Constant(word, 0))
        num_left = builder.select(is_open, made.num_regions, ir.Constant(word, 0))
        made.num_left = cgutils.alloca_once_value(builder, num_left)
        return made._getvalue()

    return _items(types.intp), build


@lower_builtin("iternext", _Items)  # type: ignore[untyped-decorator]
@iternext_impl(RefType.UNTRACKED)  # type: ignore[untyped-decorator]
def _next_item(context: Any, builder: Any, signature: Any, args: Any, result: Any) -> None:
    """The next item of the region that this thread is at, or of the next that has one left.

    Neighbours lie one behind the other in memory, which is read faster in one stream. A word for
    each region, which begins with the tag of the launch, or it is an older one's, counts the items
    that are taken.
    """
    mine = cgutils.create_struct_proxy(_items)(context, builder, value=args[0])
    word = ir.IntType(64)
    zero, one, low = (ir.Constant(word, value) for value in (0, 1, 0xFFFFFFFF))
    regions = builder.gep(_ticket(builder), [ir.Constant(word, REGIONS_OFFSET)])
    more, look, take, leave, done = (
        builder.append_basic_block(name) for name in ("more", "look", "take", "leave", "done")
    )
    builder.branch(more)
    builder.position_at_end(more)
    num_left = builder.load(mine.num_left)
    builder.cbranch(builder.icmp_signed(">", num_left, zero), look, done)
    builder.position_at_end(look)
    region = builder.load(mine.region)
    next_region = builder.add(region, one)
    first, end = (
        builder.udiv(builder.mul(mine.count, at), mine.num_regions) for at in (region, next_region)
    )
    place = builder.gep(regions, [builder.mul(region, ir.Constant(word, REGION_WORDS))])
    seen = builder.load_atomic(place, "seq_cst", 8)
    is_older = builder.icmp_unsigned("!=", builder.and_(seen, builder.not_(low)), mine.tag)
    known = builder.select(is_older, mine.tag, seen)
    item = builder.add(first, builder.and_(known, low))
    builder.cbranch(builder.icmp_signed("<", item, end), take, leave)
    builder.position_at_end(take)
    swapped = builder.cmpxchg(place, seen, builder.add(known, one), "seq_cst")
    builder.cbranch(builder.extract_value(swapped, 1), done, look)
    builder.position_at_end(leave)
    is_last = builder.icmp_unsigned("==", next_region, mine.num_regions)
    builder.store(builder.select(is_last, zero, next_region), mine.region)
    builder.store(builder.sub(num_left, one), mine.num_left)
    builder.branch(more)
    builder.position_at_end(done)
    found, valid = builder.phi(word), builder.phi(ir.IntType(1))
    for value, is_there, block in ((zero, False, more), (item, True, take)):
        found.add_incoming(value, block)
        valid.add_incoming(ir.Constant(ir.IntType(1), is_there), block)
    result.set_valid(valid)
    result.yield_(found)
