"""Links the machine code of a kernel by itself, once, so that later processes only load it.

LLVM leaves an object file in ELF's format, of which kernels use little: code, constants, and words
of 8 bytes that hold addresses. What holds more is not linked, and its kernel is loaded by numba.
Not for debuggers: unwinding tables are left out.

Source: System V ABI, "Object Files", and its supplement for AMD64, "Relocation".
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec

_X86_64 = 62
_IS_WRITTEN, _IS_LOADED = 1, 2
_SYMBOLS, _RELOCATIONS, _NO_BITS, _UNWINDING = 2, 4, 8, 0x70000001
_UNDEFINED, _FIRST_RESERVED = 0, 0xFF00
#: A word of 8 bytes that holds an address; one of 4, or of 8, that says how far away it is.
_ADDRESS, _NEAR, _CALL, _FAR = 1, 2, 4, 24
#: What the code of a kernel may ask of others, by name.
FROM_LIBC = frozenset({"memset", "memcpy", "memmove"})
FROM_NUMBA = "NRT_"


class Unlinkable(Exception):
    """An object file that holds what is not linked here."""


class Linked(msgspec.Struct, frozen=True):
    """`code` as it lies in memory from address 0 on, and where its `entries` begin, by name.

    `inner`: places of words that become addresses by adding that of the code; `outer`: places of
    words that hold the address of a name, and what is added to it.
    """

    code: bytes
    entries: dict[str, int]
    inner: list[int]
    outer: list[tuple[int, str, int]]


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    flags: int
    offset: int
    num_bytes: int
    link: int
    info: int
    alignment: int


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    section: int
    value: int
    num_bytes: int


def link(objects: Sequence[bytes], entries: Collection[str], outer: Collection[str]) -> Linked:
    """Put object files side by side, each by itself, of which `entries` will be called.

    `outer` are names beside those of libc and numba that the code may ask for. Functions that call
    what it may not are left out, unless an entry is one of them: numba wraps each kernel for calls
    from Python. Raises Unlinkable.
    """
    made, code = Linked(b"", {}, [], []), bytearray()
    for data in objects:
        code += bytes(-len(code) % 64)
        _Object(data, len(code)).add_to(made, code, entries, outer)
    if missing := set(entries) - made.entries.keys():
        raise Unlinkable(f"there is no {sorted(missing)[0]}")
    return Linked(bytes(code), made.entries, made.inner, made.outer)


class _Object:
    def __init__(self, data: bytes, base: int) -> None:
        if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", data, 18)[0] != _X86_64:
            raise Unlinkable("no object file for x86-64")
        self._data, self._base = data, base
        at, size, count = struct.unpack_from("<Q10xHH", data, 40)
        # Skips the name and the address.
        rows = (struct.unpack_from("<4xIQ8xQQIIQ", data, at + size * n) for n in range(count))
        self._sections = [_Section(*row) for row in rows]
        self._places = self._place_sections()
        self._symbols = list(self._read_symbols())

    def add_to(
        self, made: Linked, code: bytearray, entries: Collection[str], outer: Collection[str]
    ) -> None:
        code += self._lay_out()
        left_out = self._callers_of_others(outer)
        for symbol in self._symbols:
            if symbol.name in entries and symbol.section in self._places:
                if any(start <= self._place(symbol) < stop for start, stop in left_out):
                    raise Unlinkable(f"{symbol.name} asks for what is not to be had")
                made.entries[symbol.name] = self._place(symbol)
        for place, kind, symbol, addend in self._relocations():
            if any(start <= place < stop for start, stop in left_out):
                continue
            if not symbol.section:
                if kind != _ADDRESS:
                    raise Unlinkable(f"{symbol.name} is asked for by relocation {kind}")
                made.outer.append((place, symbol.name, addend))
                continue
            value = self._place(symbol) + addend
            if kind == _ADDRESS:
                made.inner.append(place)
                struct.pack_into("<q", code, place, value)
            else:
                struct.pack_into("<q" if kind == _FAR else "<i", code, place, value - place)

    def _place_sections(self) -> dict[int, int]:
        places, at = {}, self._base
        for number, section in enumerate(self._sections):
            if not section.flags & _IS_LOADED or section.kind == _UNWINDING:
                continue
            if section.num_bytes and section.flags & _IS_WRITTEN:
                raise Unlinkable("it has data that change")
            at += -at % max(section.alignment, 1)
            places[number] = at
            at += section.num_bytes
        return places

    def _lay_out(self) -> bytes:
        laid = bytearray()
        for number, place in self._places.items():
            section = self._sections[number]
            laid += bytes(place - self._base - len(laid))
            if section.kind == _NO_BITS:
                laid += bytes(section.num_bytes)
            else:
                laid += self._data[section.offset : section.offset + section.num_bytes]
        return bytes(laid)

    def _read_symbols(self) -> Iterator[_Symbol]:
        for section in self._sections:
            if section.kind != _SYMBOLS:
                continue
            names = self._sections[section.link].offset
            for at in range(section.offset, section.offset + section.num_bytes, 24):
                name, owner, value, num_bytes = struct.unpack_from("<I2xHQQ", self._data, at)
                end = self._data.index(b"\0", names + name)
                yield _Symbol(self._data[names + name : end].decode(), owner, value, num_bytes)

    def _relocations(self) -> Iterator[tuple[int, int, _Symbol, int]]:
        """Of each its place in the linked code, its kind, its symbol and what is added to that."""
        for section in self._sections:
            if section.kind != _RELOCATIONS or section.info not in self._places:
                continue
            start = self._places[section.info]
            for at in range(section.offset, section.offset + section.num_bytes, 24):
                offset, kind, number, addend = struct.unpack_from("<QIIq", self._data, at)
                if kind not in (_ADDRESS, _NEAR, _CALL, _FAR):
                    raise Unlinkable(f"it has relocation {kind}")
                yield start + offset, kind, self._symbols[number], addend

    def _place(self, symbol: _Symbol) -> int:
        if symbol.section not in self._places:
            raise Unlinkable(f"{symbol.name} lies in no part that is loaded")
        return self._places[symbol.section] + symbol.value

    def _callers_of_others(self, outer: Collection[str]) -> list[tuple[int, int]]:
        """Where the functions lie that ask for what is not to be had, or call one that does."""
        functions = [
            (self._place(symbol), self._place(symbol) + symbol.num_bytes)
            for symbol in self._symbols
            if symbol.num_bytes and symbol.section in self._places
        ]
        asked = list(self._relocations())
        found: dict[tuple[int, int], None] = {}
        while True:
            num_found = len(found)
            for place, kind, symbol, addend in asked:
                # A distance is counted from the end of the word.
                addend += 4 if kind in (_NEAR, _CALL) else 0
                if self._is_to_be_had(symbol, addend, outer, found):
                    continue
                callers = (span for span in functions if span[0] <= place < span[1])
                caller = next(callers, None)
                if caller is None:
                    raise Unlinkable(f"{symbol.name} is asked for outside of a function")
                found[caller] = None
            if len(found) == num_found:
                return list(found)

    def _is_to_be_had(
        self,
        symbol: _Symbol,
        addend: int,
        outer: Collection[str],
        left_out: Collection[tuple[int, int]],
    ) -> bool:
        if symbol.section in self._places:
            # Of a function that no other file sees the symbol is its section.
            place = self._place(symbol) + addend
            return not any(start <= place < stop for start, stop in left_out)
        name = symbol.name
        is_known = name in FROM_LIBC or name in outer or name.startswith(FROM_NUMBA)
        return symbol.section == _UNDEFINED and is_known
