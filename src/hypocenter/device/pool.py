"""How threads share the launches of a step: they enter once, and take items as they come.

The first thread to enter walks the launches; each other helps with those that have many items. It
does not wait for helpers that have not come, or not come back from the system: what they do not
take, it does itself. So a busy core costs its share and no more, and between two launches of a step
no thread goes to sleep.

The walker opens a ticket, (launch + 1) << 32 | next item, takes items with the others, in runs that
grow shorter (`lang.items`), closes the ticket when there are none left, and waits for those who are
inside. A helper says that it is inside and then looks whether the ticket is still open: one that
the walker did not wait for finds it closed. Order of memory: every access is sequentially
consistent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hypocenter.device.lang import (
    CLOSED,
    PARTS_OFFSET,
    TICKET_SYMBOL,
    binding,
    cgutils,
    inline,
    ir,
    num_threads,
    prange,
    threads_entry,
    types,
    word,
)

#: Fields of a row of a launch table.
SPREAD, ENTRY, BLOCK, NUMBER, IS_SHARED = range(5)

_LINE = 8  # words of a cache line: what threads change often lies in lines of its own
_TICKET, _INSIDE, _ENTERED, _NUM_DONE, _HAS_FAILED, _IS_OVER = (_LINE * n for n in range(6))
_CLOSED = np.uint64(CLOSED)
#: Into how many parts what is left of a launch is cut, of which a thread takes one.
_PARTS_PER_THREAD = 2
_I64 = ir.IntType(64)

_raw = np.zeros(8 * _LINE, np.uint64)
_state = _raw[-_raw.ctypes.data % 64 // 8 :][: 7 * _LINE]
binding.add_symbol(TICKET_SYMBOL, _state.ctypes.data)


def _pointer(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


@word
def _seen(typing: Any, array: Any, index: Any) -> Any:
    """The element, as other threads left it."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.uint64(array, types.intp), build


@word
def _tell(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write an element for other threads to see."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        builder.atomic_rmw("xchg", pointer, args[2], "seq_cst")
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), build


@word
def _count(typing: Any, array: Any, index: Any, change: Any) -> Any:
    """Add to an element; what it was before."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.uint64(array, types.intp, types.int64), build


@word
def _put_at(typing: Any, address: Any, value: Any) -> Any:
    """Write a word at an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], _I64.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), build


@word
def _call(typing: Any, spread: Any, entry: Any, block: Any) -> Any:
    """What the kernel at `entry` returns for the arguments in `block`: 0 when all is well."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), args[1:])

    return types.int64(types.uint64, types.uint64, types.uint64), build


@word
def _pause(typing: Any) -> Any:
    """Tell the core that this is a loop which waits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if "x86" in binding.get_default_triple():
            kind, name = ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), build


@inline
def _run_one(table: Any, index: int, state: Any) -> None:
    """A kernel, by whichever thread: one that could not do an item fails the launch for all."""
    if _call(table[index, SPREAD], table[index, ENTRY], table[index, BLOCK]) != 0:
        _tell(state, _HAS_FAILED, np.uint64(1))


@inline
def _walk(table: Any, place: int, first_word: int, state: Any) -> None:
    for index in range(table.shape[0]):
        _put_at(place, first_word + table[index, NUMBER])
        is_shared = table[index, IS_SHARED] != 0
        if is_shared:
            _tell(state, _TICKET, np.uint64(index + 1) << np.uint64(32))
        _run_one(table, index, state)
        if is_shared:
            _tell(state, _TICKET, _CLOSED)
            while _seen(state, _INSIDE) != 0:
                _pause()
        if _seen(state, _HAS_FAILED) != 0:
            break
        _tell(state, _NUM_DONE, np.uint64(index + 1))
    _tell(state, _IS_OVER, np.uint64(1))


@inline
def _help(table: Any, state: Any) -> None:
    while _seen(state, _IS_OVER) == 0:
        ticket = _seen(state, _TICKET)
        if ticket < _CLOSED:
            _count(state, _INSIDE, 1)
            ticket = _seen(state, _TICKET)
            if ticket < _CLOSED:
                _run_one(table, np.int64(ticket >> np.uint64(32)) - 1, state)
            _count(state, _INSIDE, -1)
            while _seen(state, _TICKET) >> np.uint64(32) == ticket >> np.uint64(32):
                if _seen(state, _IS_OVER) != 0:
                    break
                _pause()
        else:
            _pause()


def _enter(num_threads: int, table: Any, place: int, first_word: int, state: Any) -> None:
    for _ in prange(num_threads):
        if _count(state, _ENTERED, 1) == 0:
            _walk(table, place, first_word, state)
        else:
            _help(table, state)


_enter_step = threads_entry(_enter)


def run(table: np.ndarray[Any, Any], place: int, first_word: int) -> int:
    """Run the launches of a table u64 [num_launches, 5], writing `first_word` + the number of each
    at the address `place` before it. Returns how many ended well.

    One at a time in a process: the launch door sees to that.
    """
    state, most = _state, num_threads()
    state[:] = 0
    state[_TICKET] = _CLOSED
    state[PARTS_OFFSET] = _PARTS_PER_THREAD * most
    _enter_step(most, table, np.uint64(place), np.uint64(first_word), state)
    return int(state[_NUM_DONE])
