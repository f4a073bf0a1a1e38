"""How threads share the launches of a step: they enter once, and take items as they come.

The first thread to enter walks the launches; each other helps with those that have many items. It
does not wait for helpers that have not come, or not come back from the system: what they do not
take, it does itself. So a busy core costs its share and no more, and between two launches of a step
no thread goes to sleep.

The walker opens a ticket, (launch + 1) << 32, and closes it when no items are left; then it waits
for those who are inside. A helper says that it is inside and then looks whether the ticket is still
open: one that the walker did not wait for finds it closed. The items of a launch lie in as many
regions as there are threads; each takes those of its own one by one, and then helps with the others
(`lang.items`). So it is known beforehand what a thread will read, and one that waits, for the end
of a launch or of one that the walker does alone, brings the first weights of its next region into
its cache meanwhile. Order of memory: every access that threads agree by is sequentially
consistent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.cpu.cache_lines import load_lines
from hypocenter.device.cpu.items import (
    CLOSED,
    NUM_REGIONS_OFFSET,
    REGION_WORDS,
    REGIONS_OFFSET,
    TICKET_SYMBOL,
)
from hypocenter.device.cpu.lang import (
    binding,
    cgutils,
    inline,
    intrinsic,
    ir,
    max_num_threads,
    num_threads,
    prange,
    threads_entry,
    types,
)
from hypocenter.device.cpu.large_pages import LINE_BYTES

#: Fields of a row of a launch table: what to call, and the word to leave before; whether threads
#: share it; the nearest launch after it that reads weights; the bytes of an item of weights, and
#: where each of up to three stretches of items begins and how many it has.
SPREAD, ENTRY, BLOCK, NUMBER, IS_SHARED, NEXT, ITEM_BYTES, STRETCHES = range(8)
NUM_STRETCHES = 3
NUM_FIELDS = STRETCHES + 2 * NUM_STRETCHES

_LINE = 8  # words of a cache line: what threads change often lies in lines of its own
_TICKET, _INSIDE, _ENTERED, _NUM_DONE, _HAS_FAILED, _IS_OVER = (_LINE * n for n in range(6))
_CLOSED = np.uint64(CLOSED)
#: What a thread that waits fetches at a time, and at most: a quarter of a core's own cache.
_FETCH_BYTES, _MOST_BYTES = 1024, 256 << 10
_I64 = ir.IntType(64)

_num_words = REGIONS_OFFSET + max_num_threads() * REGION_WORDS
_raw = np.zeros(_num_words + _LINE, np.uint64)
_state = _raw[-_raw.ctypes.data % 64 // 8 :][:_num_words]
binding.add_symbol(TICKET_SYMBOL, _state.ctypes.data)


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
        _tell(state, _HAS_FAILED, np.uint64(1))


@inline
def _walk(table: Any, place: int, first_word: int, state: Any, num_threads: int) -> None:
    for index in range(table.shape[0]):
        _put_at(place, first_word + table[index, NUMBER])
        is_shared = table[index, IS_SHARED] != 0
        if is_shared:
            _tell(state, _TICKET, np.uint64(index + 1) << np.uint64(32))
        _run_one(table, index, state, 0)
        if is_shared:
            _tell(state, _TICKET, _CLOSED)
            at, stop = _share(table, table[index, NEXT], 0, num_threads)
            while _load_shared(state, _INSIDE) != 0:
                at = _fetch_some(at, stop)
        if _load_shared(state, _HAS_FAILED) != 0:
            break
        _tell(state, _NUM_DONE, np.uint64(index + 1))
    _tell(state, _IS_OVER, np.uint64(1))


@inline
def _help(table: Any, state: Any, thread: int, num_threads: int) -> None:
    last, ahead_of, at, stop = np.int64(0), np.int64(-1), np.int64(0), np.int64(0)
    while _load_shared(state, _IS_OVER) == 0:
        ticket = _load_shared(state, _TICKET)
        if ticket < _CLOSED and np.int64(ticket >> np.uint64(32)) != last:
            _count(state, _INSIDE, 1)
            ticket = _load_shared(state, _TICKET)
            if ticket < _CLOSED:
                last = np.int64(ticket >> np.uint64(32))
                _run_one(table, last - 1, state, thread)
            _count(state, _INSIDE, -1)
        else:
            done = max(np.int64(_load_shared(state, _NUM_DONE)), last)
            if done > 0 and table[done - 1, NEXT] != ahead_of:
                ahead_of = table[done - 1, NEXT]
                at, stop = _share(table, ahead_of, thread, num_threads)
            at = _fetch_some(at, stop)


def _enter(num_threads: int, table: Any, place: int, first_word: int, state: Any) -> None:
    for _ in prange(num_threads):
        thread = np.int64(_count(state, _ENTERED, 1))
        if thread == 0:
            _walk(table, place, first_word, state, num_threads)
        else:
            _help(table, state, thread, num_threads)


_enter_step = threads_entry(_enter)


def start() -> None:
    """Load, or compile, how threads get into a step, so that the first step need not."""
    run(np.zeros((0, NUM_FIELDS), np.int64), 0, 0)


def run(table: np.ndarray[Any, Any], place: int, first_word: int) -> int:
    """Run the launches of a table i64 [num_launches, NUM_FIELDS], writing `first_word` + the number
    of each at the address `place` before it. Returns how many ended well.

    One at a time in a process: the launch door sees to that.
    """
    state, most = _state, num_threads()
    state[:] = 0
    state[_TICKET] = _CLOSED
    state[NUM_REGIONS_OFFSET] = most
    _enter_step(most, table, place, first_word, state)
    return int(state[_NUM_DONE])
