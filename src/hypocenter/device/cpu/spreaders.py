"""The small functions between a launch and its kernel, as LLVM makes them of types of arguments.

A spreader calls a kernel: it spreads a block of 8-byte slots over the registers and the stack as
numba's calling convention asks. `ENTER` is what threads that are called together run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypocenter.device.cpu.lang import binding, ir

#: `void enter(arguments, counts, steps, data)`: counts[0] times, the spreader, the kernel and the
#: block whose addresses are the three words at `data`.
ENTER = "enter"
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_WORD = _I64.as_pointer()
_KINDS = {str(kind): kind for kind in (_I8, ir.IntType(16), _I32, _I64)} | {
    "float": ir.FloatType(),
    "double": ir.DoubleType(),
}
#: Machine code lives as long as what compiled it.
_engines: list[Any] = []


def name_of(index: int) -> str:
    """The name of the spreader for the types at `index`."""
    return f"spread{index}"


def object_code(wanted: Sequence[tuple[str, ...]]) -> bytes:
    """An object file with `i64 spread(function, block, thread)` for each of these types of slots,
    which leaves the thread's number where a kernel's result would go; and with `ENTER`."""
    return bytes(_machine().emit_object(_module(wanted)))


def addresses(wanted: Sequence[tuple[str, ...]]) -> tuple[list[int], int]:
    """Compiled here: a spreader for each of these types, and `ENTER`."""
    engine = binding.create_mcjit_compiler(_module(wanted), _machine())
    engine.finalize_object()
    _engines.append(engine)
    spreaders = [int(engine.get_function_address(name_of(n))) for n in range(len(wanted))]
    return spreaders, int(engine.get_function_address(ENTER))


def _machine() -> Any:
    return binding.Target.from_default_triple().create_target_machine(jit=True)


def _module(wanted: Sequence[tuple[str, ...]]) -> Any:
    module = ir.Module("spread")
    module.triple = binding.get_default_triple()
    for index, slot_types in enumerate(wanted):
        _write_spreader(module, name_of(index), slot_types)
    _write_enter(module)
    return binding.parse_assembly(str(module))


def _write_spreader(module: Any, name: str, slot_types: tuple[str, ...]) -> None:
    wanted = [_KINDS[slot_type] for slot_type in slot_types]
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
            values.append(builder.bitcast(builder.trunc(slot, _I32), kind))
        else:
            values.append(builder.bitcast(slot, kind))
    kernel = ir.FunctionType(_I32, [_I64, _I64, *wanted]).as_pointer()
    status = builder.call(builder.inttoptr(function.args[0], kernel), values)
    builder.ret(builder.sext(status, _I64))


def _write_enter(module: Any) -> None:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_WORD] * 4), ENTER)
    first, again, done = (function.append_basic_block() for _ in range(3))
    builder = ir.IRBuilder(first)
    _, counts, _, data = function.args
    spread, kernel, block = (
        builder.load(builder.gep(data, [ir.Constant(_I64, at)])) for at in range(3)
    )
    count = builder.load(counts)
    kind = ir.FunctionType(_I64, [_I64] * 3).as_pointer()
    spreader = builder.inttoptr(spread, kind)
    zero, one = ir.Constant(_I64, 0), ir.Constant(_I64, 1)
    builder.cbranch(builder.icmp_signed(">", count, zero), again, done)
    builder.position_at_end(again)
    number = builder.phi(_I64)
    builder.call(spreader, [kernel, block, zero])
    following = builder.add(number, one)
    number.add_incoming(zero, first)
    number.add_incoming(following, again)
    builder.cbranch(builder.icmp_signed("<", following, count), again, done)
    builder.position_at_end(done)
    builder.ret_void()
