"""Which types a libdevice function takes and gives, read from Triton's own tables of them.

Triton converts no operand of these functions: what its table lacks does not compile.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from hypocenter.device.triton_lang import tl

#: Types of the operands to that of the result.
_Table = Mapping[tuple[Any, ...], Any]


def result_type(name: str, types: Sequence[Any]) -> Any:
    """The type that the libdevice function `name` gives for operands of `types`.

    Raises TypeError, with the types that it takes, for what Triton does not compile.
    """
    table = _table(name)
    if table and tuple(types) not in table:
        wanted = repr(next(iter(table))[0]).removeprefix("triton.language.")
        takes = " or ".join(_show(operands) for operands in table)
        raise TypeError(
            f"libdevice.{name} takes {takes}, but got {_show(types)}; Triton converts nothing "
            f"here, so cast with .to(tl.{wanted})"
        )
    return table.get(tuple(types), types[0])


def _show(types: Sequence[Any]) -> str:
    return str(types[0]) if len(types) == 1 else f"({', '.join(map(str, types))})"


class _Extern:
    """Stands for what a libdevice function gives, and hears what that is cast to."""

    def __init__(self, symbols: Mapping[tuple[Any, ...], tuple[str, Any]]) -> None:
        self.table = {types: gives for types, (_, gives) in symbols.items()}

    def to(self, kind: Any, **_: Any) -> _Extern:
        self.table = dict.fromkeys(self.table, kind)
        return self


#: Functions by name, those of every vendor: as they are before an interpretation replaces them.
_FUNCTIONS: dict[str, list[Any]] = {}
for _library in (tl.extra.cuda.libdevice, tl.extra.hip.libdevice):
    for _name, _function in vars(_library).items():
        _FUNCTIONS.setdefault(_name, []).append(_function)


@functools.cache
def _table(name: str) -> _Table:
    """The table of a function, of all vendors that have it; empty where none says."""
    found: dict[tuple[Any, ...], Any] = {}
    plain = tl.core.extern_elementwise
    tl.core.extern_elementwise = lambda library, path, args, symbols, **_: _Extern(symbols)
    try:
        for function in _FUNCTIONS.get(name, ()):
            operands = [part for part in signature(function).parameters if part != "_semantic"]
            said = function(*(0 for _ in operands), _semantic=object())
            if isinstance(said, _Extern):
                found.update(said.table)
    finally:
        tl.core.extern_elementwise = plain
    return found
