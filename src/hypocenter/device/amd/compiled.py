"""How the machine's own functions are compiled, and what they need that Python has no word for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

import hypocenter.device.cpu.numba_target  # noqa: F401  # before anything is compiled
from hypocenter.device.cpu.code_cache import keep

_I64 = ir.IntType(64)
_HANDLER = ir.FunctionType(ir.VoidType(), [_I64.as_pointer(), _I64])


def compile_call(function: Callable[..., Any]) -> Any:
    """Compiled when first called, and its machine code kept on disk where that is allowed."""
    dispatcher = njit(function, error_model="numpy", nogil=True, boundscheck=False)
    keep(dispatcher, function, "amd")
    return dispatcher


def compile_inline(function: Callable[..., Any]) -> Any:
    """Compiled into whoever calls it: for what is done lane by lane."""
    return njit(function, error_model="numpy", nogil=True, boundscheck=False, forceinline=True)


@intrinsic
def call_handler(context: Any, address: Any, rows: Any, num_lanes: Any) -> Any:
    """Call the handler at `address` with the address of its rows."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        function = builder.inttoptr(args[0], _HANDLER.as_pointer())
        pointer = builder.inttoptr(builder.bitcast(args[1], _I64), _I64.as_pointer())
        builder.call(function, [pointer, args[2]])
        return ir.Constant(_I64, 0)

    return types.int64(types.int64, types.uint64, types.int64), emit


def _loading(num_bits: int) -> Any:
    kind = ir.IntType(num_bits)

    def load(context: Any, address: Any) -> Any:
        """The number without sign at an address of this process; any alignment."""

        def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], kind.as_pointer())
            return builder.zext(builder.load(pointer, align=1), _I64)

        return types.int64(types.int64), emit

    return intrinsic(load)


def _storing(num_bits: int) -> Any:
    kind = ir.IntType(num_bits)

    def store(context: Any, address: Any, value: Any) -> Any:
        """Put the low bits of `value` at an address of this process; any alignment."""

        def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], kind.as_pointer())
            builder.store(builder.trunc(args[1], kind), pointer, align=1)
            return ir.Constant(_I64, 0)

        return types.int64(types.int64, types.int64), emit

    return intrinsic(store)


load_byte, load_half, load_word = _loading(8), _loading(16), _loading(32)
store_byte, store_half, store_word = _storing(8), _storing(16), _storing(32)


@compile_inline
def load_bytes(address: int, num_bytes: int) -> int:
    """1, 2, 4 or 8 bytes, little-endian, as an int64."""
    if num_bytes == 4:
        return load_word(address)
    if num_bytes == 8:
        return load_word(address) | load_word(address + 4) << 32
    return load_half(address) if num_bytes == 2 else load_byte(address)


@compile_inline
def store_bytes(address: int, value: int, num_bytes: int) -> None:
    """The low 1, 2, 4 or 8 bytes of a value, little-endian."""
    if num_bytes == 8:
        store_word(address + 4, value >> 32)
    if num_bytes >= 4:
        store_word(address, value)
    elif num_bytes == 2:
        store_half(address, value)
    else:
        store_byte(address, value)
