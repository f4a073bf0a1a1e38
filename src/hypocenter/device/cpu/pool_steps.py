"""What a thread does in a step: the machine code of `pool.py`, which says how threads share it."""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.cache_lines import load_lines
from hypocenter.device.cpu.lang import (
    binding,
    cgutils,
    cpu_kernel,
    inline,
    intrinsic,
    ir,
    types,
)
from hypocenter.device.cpu.large_pages import LINE_BYTES
from hypocenter.device.cpu.shared_state import (
    BLOCK,
    CLOSED,
    ENTERED,
    ENTRY,
    HAS_FAILED,
    INSIDE,
    IS_OVER,
    IS_SHARED,
    ITEM_BYTES,
    NEXT,
    NUM_DONE,
    NUM_STRETCHES,
    NUMBER,
    SPREAD,
    STRETCHES,
    TICKET,
)

_CLOSED = np.uint64(CLOSED)
#: What a thread that waits fetches at a time, and at most: a quarter of a core's own cache.
_FETCH_BYTES, _MOST_BYTES = 1024, 256 << 10
_I64 = ir.IntType(64)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


@intrinsic
def _load_shared(typing: Any, array: Any, index: Any) -> Any:
    """The element, as other threads left it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.uint64(array, types.intp), build


@intrinsic
def _tell(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write an element for other threads to see."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        builder.atomic_rmw("xchg", pointer, args[2], "seq_cst")
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), build


@intrinsic
def _count(typing: Any, array: Any, index: Any, change: Any) -> Any:
    """Add to an element; what it was before."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.uint64(array, types.intp, types.int64), build


@intrinsic
def _put_at(typing: Any, address: Any, value: Any) -> Any:
    """Write a word at an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def _call(typing: Any, spread: Any, entry: Any, block: Any, thread: Any) -> Any:
    """What the kernel at `entry` returns for the arguments in `block`: 0 when all is well."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64, _I64]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), args[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), build


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell the core that this is a loop which waits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86" in binding.get_default_triple():
            kind, name = ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), build


@intrinsic
def _fetch(typing: Any, address: Any) -> Any:
    """Bring `_FETCH_BYTES` at an address into this core's caches.

    By loads: a core drops what it is asked to prefetch when too much is on its way already.
    """

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], _I64.as_pointer())
        load_lines(builder, first, _FETCH_BYTES // LINE_BYTES)
        return context.get_dummy_value()

    return types.void(types.int64), build


@inline
def _fetch_some(at: int, stop: int) -> int:
    """Fetch a little of at .. stop, or pause when there is none; how far that is."""
    if at >= stop:
        _pause()
        return at
    _fetch(at)
    return at + _FETCH_BYTES


@inline
def _share(table: Any, index: int, thread: int, num_threads: int) -> Any:
    """Where a thread begins to read the weights of a launch, and how far it is to fetch them:
    two addresses."""
    if index < table.shape[0]:
        row = table[index]
        num_items = row[STRETCHES + 1] + row[STRETCHES + 3] + row[STRETCHES + 5]
        item = num_items * thread // num_threads
        for stretch in range(STRETCHES, STRETCHES + 2 * NUM_STRETCHES, 2):
            if item < row[stretch + 1]:
                num_bytes = min((row[stretch + 1] - item) * row[ITEM_BYTES], _MOST_BYTES)
                at = row[stretch] + item * row[ITEM_BYTES]
                return at, at + num_bytes // _FETCH_BYTES * _FETCH_BYTES
            item -= row[stretch + 1]
    return 0, 0


@inline
def _run_one(table: Any, index: int, state: Any, thread: int) -> None:
    """A kernel, by whichever thread: one that could not do an item fails the launch for all."""
    row = table[index]
    if _call(row[SPREAD], row[ENTRY], row[BLOCK], thread) != 0:
        _tell(state, HAS_FAILED, np.uint64(1))


@inline
def _walk(table: Any, place: int, first_word: int, state: Any, num_threads: int) -> None:
    for index in range(table.shape[0]):
        _put_at(place, first_word + table[index, NUMBER])
        is_shared = table[index, IS_SHARED] != 0
        if is_shared:
            _tell(state, TICKET, np.uint64(index + 1) << np.uint64(32))
        _run_one(table, index, state, 0)
        if is_shared:
            _tell(state, TICKET, _CLOSED)
            at, stop = _share(table, table[index, NEXT], 0, num_threads)
            while _load_shared(state, INSIDE) != 0:
                at = _fetch_some(at, stop)
        if _load_shared(state, HAS_FAILED) != 0:
            break
        _tell(state, NUM_DONE, np.uint64(index + 1))
    _tell(state, IS_OVER, np.uint64(1))


@inline
def _help(table: Any, state: Any, thread: int, num_threads: int) -> None:
    last, ahead_of, at, stop = np.int64(0), np.int64(-1), np.int64(0), np.int64(0)
    while _load_shared(state, IS_OVER) == 0:
        ticket = _load_shared(state, TICKET)
        if ticket < _CLOSED and np.int64(ticket >> np.uint64(32)) != last:
            _count(state, INSIDE, 1)
            ticket = _load_shared(state, TICKET)
            if ticket < _CLOSED:
                last = np.int64(ticket >> np.uint64(32))
                _run_one(table, last - 1, state, thread)
            _count(state, INSIDE, -1)
        else:
            done = max(np.int64(_load_shared(state, NUM_DONE)), last)
            if done > 0 and table[done - 1, NEXT] != ahead_of:
                ahead_of = table[done - 1, NEXT]
                at, stop = _share(table, ahead_of, thread, num_threads)
            at = _fetch_some(at, stop)


@cpu_kernel
def enter(table: Any, place: int, first_word: int, state: Any, num_threads: int) -> None:
    """Formula: the launches of `table`, by this thread and others that enter.
    Shapes: table i64 [num_launches, NUM_FIELDS]; state u64 [words of `shared_state`].
    """
    thread = np.int64(_count(state, ENTERED, 1))
    if thread == 0:
        _walk(table, place, first_word, state, num_threads)
    else:
        _help(table, state, thread, num_threads)
