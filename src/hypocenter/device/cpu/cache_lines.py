"""Bringing memory into the caches before it is needed: words for CPU kernels, and what they are
built of. All of it works by whole cache lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypocenter.device.cpu.lang import cgutils, ir, literal, literal_intrinsic, types
from hypocenter.device.cpu.large_pages import LINE_BYTES
from hypocenter.device.cpu.target import cpu_name
from hypocenter.device.cpu.vector_ir import I32, Codegen, address_of

#: How far ahead memory is asked for: what one thread reads in the time that memory takes to answer.
AHEAD_BYTES = 4096
#: Processors, as LLVM spells them, that see for themselves what is read next, and lose by being
#: asked; and those that do where codes are whole bytes, which are read with so few instructions.
_FORESIGHTED = ("znver4",)
_FORESIGHTED_OF_BYTES = ("znver4", "znver5")


def asks_ahead(*, of_bytes: bool = False) -> bool:
    """Whether kernels ask for the weights that they are about to read; `docs/cpu.md` has what that
    gives on which processor."""
    return cpu_name() not in (_FORESIGHTED_OF_BYTES if of_bytes else _FORESIGHTED)


def ask_for_lines(
    builder: Any, address: Any, start: int, num_lines: int, *, nearest: bool = True
) -> None:
    """Ask memory for cache lines from `start` bytes behind an address on, to lie in the cache that
    is nearest, or in the second."""
    first = builder.bitcast(address, ir.IntType(8).as_pointer())
    function = ir.FunctionType(ir.VoidType(), [first.type, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
    # To be read, how near, as data.
    how = [ir.Constant(I32, value) for value in (0, 3 if nearest else 2, 1)]
    for line in range(num_lines):
        at = ir.Constant(ir.IntType(64), start + line * LINE_BYTES)
        builder.call(fetch, [builder.gep(first, [at]), *how])


def load_lines(builder: Any, address: Any, num_lines: int) -> None:
    """Load a byte of each of so many cache lines from an address on."""
    first = builder.bitcast(address, ir.IntType(8).as_pointer())
    for line in range(num_lines):
        at = builder.gep(first, [ir.Constant(ir.IntType(64), line * LINE_BYTES)])
        # Atomic, or it would be left out because nobody looks at what is loaded.
        builder.load_atomic(at, "monotonic", 1)


@literal_intrinsic
def prefetch(typing: Any, array: Any, index: Any, count: Any) -> tuple[Any, Codegen]:
    """Ask for `count` elements, to lie in the second cache; harmless wherever they are."""

    def ask(builder: Any, address: Any, num_lines: int) -> None:
        ask_for_lines(builder, address, 0, num_lines, nearest=False)

    return _by_lines(array, count, ask)


@literal_intrinsic
def fetch_ahead(typing: Any, array: Any, index: Any, count: Any) -> tuple[Any, Codegen]:
    """Ask for what lies `AHEAD_BYTES` behind `count` elements; beyond the array it does no harm."""

    def ask(builder: Any, address: Any, num_lines: int) -> None:
        if asks_ahead():
            ask_for_lines(builder, address, AHEAD_BYTES, num_lines)

    return _by_lines(array, count, ask)


@literal_intrinsic
def fetch(typing: Any, array: Any, index: Any, count: Any) -> tuple[Any, Codegen]:
    """Load a little of each line of `count` elements: a core drops none of what it loads, as it
    does of what it is asked for."""
    return _by_lines(array, count, load_lines)


def _by_lines(array: Any, count: Any, act: Callable[[Any, Any, int], None]) -> tuple[Any, Codegen]:
    """A word that does `act` at an element, for the lines of `count` of them."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = address_of(context, builder, array, args[0], args[1])
        num_bytes = literal(count) * array.dtype.bitwidth // 8
        act(builder, address, -(-num_bytes // LINE_BYTES))
        return context.get_dummy_value()

    if not literal(count):
        return None  # type: ignore[return-value]
    return types.void(array, types.intp, count), build
