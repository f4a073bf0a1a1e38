"""The launches of a CPU plan as one call into machine code, with no Python between kernels.

Python takes about a microsecond to launch a kernel, which a step of a small batch has hundreds of.
Here the arguments of each launch lie unboxed in a block of 8-byte slots; a small function per
signature spreads a block over the registers and the stack as numba's calling convention asks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hypocenter.base.errors import LaunchRejected
from hypocenter.base.refusals import Refused
from hypocenter.device.cpu import pool
from hypocenter.device.cpu.lang import binding, ir, kernel_entry, kinds_of, types

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_WORD = _I64.as_pointer()
#: A kernel's one way to fail is that it finds no memory for its own arrays.
KERNEL_FAILED = "the kernel found no memory for its scratch; free some, or use fewer threads"
#: Machine code lives as long as what compiled it.
_engines: list[Any] = []


class NativeLaunches:
    """Launches that one call runs, each after writing its number where the recorder wants it."""

    def __init__(self, launches: Sequence[tuple[int, Any, tuple[Any, ...]]]) -> None:
        """`launches`: number, numba's dispatcher or a SharedKernel, and arguments; all compiled."""
        self._kept = tuple(launches)  # the arguments' memory must outlive the blocks
        self._blocks = []
        table = np.zeros((len(launches), pool.NUM_FIELDS), np.int64)
        entries = [
            kernel_entry(getattr(function, "dispatcher", function), args)
            for _, function, args in launches
        ]
        slot_types = [tuple(map(str, _slot_types(kinds))) for _, kinds in entries]
        _make_spreaders(slot_types)
        for row, (number, function, args), (address, kinds), of_slots in zip(
            table, launches, entries, slot_types, strict=True
        ):
            is_shared = isinstance(function, SharedKernel)
            slots = np.array(list(_slots(args, kinds)), np.uint64)
            self._blocks.append(slots)
            spread = _spreaders[of_slots]
            row[: pool.NEXT] = spread, address, slots.ctypes.data, number, is_shared
            if is_shared:
                _note_weights(row, function.reads)
        is_reader = table[:, pool.ITEM_BYTES] > 0
        readers = np.append(np.flatnonzero(is_reader), len(table))
        table[:, pool.NEXT] = readers[np.searchsorted(readers, np.arange(len(table)), "right")]
        self._table = table

    def run(self, place: int, word: int) -> int:
        """Run them, writing `word` + number at the address `place` before each.

        Returns how many ended well: all of them, or the index of one that failed.
        """
        return pool.run(self._table, place, word)


class SharedKernel:
    """The compiled form of a kernel whose items several threads take.

    `reads`: the arrays that the items go through, one after the other, and the items of each.
    """

    def __init__(self, dispatcher: Any, reads: Sequence[tuple[Any, int]] = ()) -> None:
        self.dispatcher, self.reads = dispatcher, tuple(reads)

    def __call__(self, *args: Any) -> None:
        self.bound(args)()

    def bound(self, args: tuple[Any, ...]) -> Callable[[], None]:
        """A launch of it; what that needs is made when it first runs."""
        return _BoundLaunch(self, args)


class _BoundLaunch:
    __slots__ = ("_args", "_kernel", "_native", "_word")

    def __init__(self, kernel: SharedKernel, args: tuple[Any, ...]) -> None:
        self._kernel, self._args = kernel, args
        self._native: NativeLaunches | None = None
        self._word = np.zeros(1, np.uint64)

    def __call__(self) -> None:
        if self._native is None:
            dispatcher = self._kernel.dispatcher
            kinds = kinds_of(self._args)
            if kinds not in dispatcher.overloads:
                dispatcher.compile(kinds)
            self._native = NativeLaunches([(0, self._kernel, self._args)])
        if self._native.run(self._word.ctypes.data, 0) != 1:
            name = self._kernel.dispatcher.py_func.__name__
            raise LaunchRejected(name, Refused(what=KERNEL_FAILED))


def _note_weights(row: Any, reads: Sequence[tuple[Any, int]]) -> None:
    """What threads need to ask early for the part that they will read."""
    places = row[pool.STRETCHES :].reshape(-1, 2)
    for place, (array, num_items) in zip(places, reads, strict=False):
        place[:] = array.ctypes.data, num_items
        row[pool.ITEM_BYTES] = array.nbytes // num_items


def _slots(args: Sequence[Any], kinds: Sequence[Any]) -> Iterator[int]:
    """The 8-byte words that numba's convention makes of arguments."""
    for value, kind in zip(args, kinds, strict=True):
        if isinstance(kind, types.Array):
            # No owner and no parent: nobody counts references.
            yield from (0, 0, value.size, value.itemsize, value.ctypes.data)
            yield from value.shape
            yield from value.strides
        elif isinstance(kind, types.Float):
            form = "<fxxxx" if kind.bitwidth == 32 else "<d"
            yield int.from_bytes(struct.pack(form, value), "little")
        else:
            yield int(value) & 0xFFFFFFFFFFFFFFFF


def _slot_types(kinds: Sequence[Any]) -> Iterator[Any]:
    for kind in kinds:
        if isinstance(kind, types.Array):
            yield from [_I64] * (5 + 2 * kind.ndim)
        elif isinstance(kind, types.Float):
            yield ir.FloatType() if kind.bitwidth == 32 else ir.DoubleType()
        elif isinstance(kind, types.Boolean):
            yield _I8
        else:
            yield ir.IntType(kind.bitwidth)


#: Addresses of `i64 spread(function, block, thread)`, which calls a kernel with a block's slots,
#: and with the thread's number where its result would go; by the types of the slots.
_spreaders: dict[tuple[str, ...], int] = {}


def _make_spreaders(wanted: Sequence[tuple[str, ...]]) -> None:
    """Those that are missing, in one go: most of what it takes, it takes once."""
    missing = [slots for slots in dict.fromkeys(wanted) if slots not in _spreaders]
    if not missing:
        return
    module = ir.Module("spread")
    module.triple = binding.get_default_triple()
    for index, slot_types in enumerate(missing):
        _write_spreader(module, f"spread{index}", slot_types)
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(module)), machine)
    engine.finalize_object()
    _engines.append(engine)
    for index, slot_types in enumerate(missing):
        _spreaders[slot_types] = int(engine.get_function_address(f"spread{index}"))


def _write_spreader(module: Any, name: str, slot_types: tuple[str, ...]) -> None:
    kinds = {
        str(kind): kind for kind in (_I8, _I64, ir.IntType(32), ir.FloatType(), ir.DoubleType())
    }
    wanted = [kinds[slot_type] for slot_type in slot_types]
    function = ir.Function(module, ir.FunctionType(_I64, [_I64, _I64, _I64]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    block = builder.inttoptr(function.args[1], _WORD)
    # Where a kernel would put its result and its exception.
    places = [builder.alloca(_I64) for _ in range(2)]
    builder.store(function.args[2], places[0])
    values = [builder.ptrtoint(place, _I64) for place in places]
    for index, kind in enumerate(wanted):
        slot = builder.load(builder.gep(block, [ir.Constant(_I64, index)]))
        if isinstance(kind, ir.IntType):
            values.append(slot if kind.width == 64 else builder.trunc(slot, kind))
        elif isinstance(kind, ir.FloatType):
            values.append(builder.bitcast(builder.trunc(slot, ir.IntType(32)), kind))
        else:
            values.append(builder.bitcast(slot, kind))
    kernel = ir.FunctionType(ir.IntType(32), [_I64, _I64, *wanted]).as_pointer()
    status = builder.call(builder.inttoptr(function.args[0], kernel), values)
    builder.ret(builder.sext(status, _I64))
